from services.trainer.objective.algorithms.algorithm import Algorithm
from services.trainer.objective.algorithms.grpo import clipped_token_term


def dapo() -> Algorithm:
    """Decoupled clip: more room upwards, where unlikely tokens gain probability, and each token with the same say.

    arXiv 2503.14476, equation 8 and section 4.1.
    """
    return Algorithm("dapo", clipped_token_term, aggregation="token_mean", clip_low=0.2, clip_high=0.28)
