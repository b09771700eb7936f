from services.trainer.objective.algorithms.algorithm import Algorithm
from services.trainer.objective.algorithms.grpo import clipped_token_term


def dapo() -> Algorithm:
    """Decoupled clip: more room upwards, where unlikely tokens gain probability, and each token with the same say.

    arXiv 2503.14476, equation 8 and section 4.1, with dynamic sampling (section 3.2). What answers pay that ran out of
    room (3.4) is a choice of its own: overlong_penalty and LossInputs.truncated.
    """
    return Algorithm(
        "dapo", clipped_token_term, aggregation="token_mean", clip_low=0.2, clip_high=0.28, dynamic_sampling=True
    )
