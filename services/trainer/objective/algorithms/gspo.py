from services.trainer.objective.algorithms.algorithm import Algorithm
from services.trainer.objective.policy_term import Clip, PolicyTerm, clipped_term
from services.trainer.objective.ratio import sequence_log_ratio
from services.trainer.objective.types import LossInputs


def gspo() -> Algorithm:
    """Group Sequence Policy Optimization: ratio and clip belong to the sequence, as the reward does.

    arXiv 2507.18071, equation 5 and section 5.1. A mean moves far less than a single token does, hence the tiny range.
    """
    return Algorithm("gspo", clipped_sequence_term, aggregation="sequence_mean", clip_low=3e-4, clip_high=4e-4)


def clipped_sequence_term(inputs: LossInputs, clip: Clip) -> PolicyTerm:
    log_ratio = sequence_log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.sequence_ids, inputs.sequences)
    return clipped_term(log_ratio, inputs.token_advantages, clip)
