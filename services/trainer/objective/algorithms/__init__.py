from services.trainer.objective.algorithms.base import Algorithm, PreferenceAlgorithm
from services.trainer.objective.algorithms.builtin import ALGORITHMS, find_algorithm

__all__ = ["ALGORITHMS", "Algorithm", "PreferenceAlgorithm", "find_algorithm"]
