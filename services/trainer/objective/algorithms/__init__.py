from services.trainer.objective.algorithms.algorithm import Algorithm
from services.trainer.objective.algorithms.registry import ALGORITHMS, find_algorithm

__all__ = ["ALGORITHMS", "Algorithm", "find_algorithm"]
