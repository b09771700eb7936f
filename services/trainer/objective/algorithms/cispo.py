from services.trainer.objective.algorithms.algorithm import Algorithm
from services.trainer.objective.policy_term import Clip, PolicyTerm, cispo_term
from services.trainer.objective.ratio import token_log_ratio
from services.trainer.objective.types import LossInputs


def cispo() -> Algorithm:
    """Clipped importance weight: rare tokens that the policy has already moved still teach it.

    MiniMax-M1 report, arXiv 2506.13585, equation 4. The report sets no lower bound, hence clip_low 1, and tunes the
    upper one; a weight of at most 5 is a choice made here.
    """
    return Algorithm("cispo", clipped_weight_term, aggregation="token_mean", clip_low=1.0, clip_high=4.0)


def clipped_weight_term(inputs: LossInputs, clip: Clip) -> PolicyTerm:
    log_ratio = token_log_ratio(inputs.logprobs, inputs.old_logprobs)
    return cispo_term(inputs.logprobs, log_ratio, inputs.token_advantages, clip)
