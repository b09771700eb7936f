from services.trainer.objective.algorithms.base import PreferenceAlgorithm
from services.trainer.objective.dpo import dpo_loss


def dpo() -> PreferenceAlgorithm:
    """Direct Preference Optimization: the better answer of a pair gains on the worse, as far as the reference lets it.

    arXiv 2305.18290, equation 7. Pairs come from a file, or are the best and the worst sample of each scored group.
    """
    return PreferenceAlgorithm("dpo", dpo_loss, beta=0.1)
