from services.trainer.objective.algorithms.algorithm import Algorithm
from services.trainer.objective.algorithms.preference import PreferenceAlgorithm
from services.trainer.objective.algorithms.registry import ALGORITHMS, find_algorithm

__all__ = ["ALGORITHMS", "Algorithm", "PreferenceAlgorithm", "find_algorithm"]
