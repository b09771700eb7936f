from services.trainer.objective.algorithms.algorithm import Algorithm
from services.trainer.objective.algorithms.grpo import clipped_token_term


def dr_grpo() -> Algorithm:
    """GRPO done right: a constant divisor, so that no token counts less for standing in a long answer.

    arXiv 2503.20783, section 3.2. Its other half is advantages without division by the standard deviation.
    """
    return Algorithm("dr_grpo", clipped_token_term, aggregation="fixed_length", clip_low=0.2, clip_high=0.2)
