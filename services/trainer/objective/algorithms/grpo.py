from services.trainer.objective.algorithms.algorithm import Algorithm
from services.trainer.objective.policy_term import Clip, PolicyTerm, clipped_term
from services.trainer.objective.ratio import token_log_ratio
from services.trainer.objective.types import LossInputs


def grpo() -> Algorithm:
    """Group Relative Policy Optimization: PPO's clipped term, each sequence with the same say whatever its length.

    DeepSeekMath, arXiv 2402.03300, equation 3. The paper leaves the clip range open; 0.2 is PPO's.
    """
    return Algorithm("grpo", clipped_token_term, aggregation="sequence_mean", clip_low=0.2, clip_high=0.2)


def clipped_token_term(inputs: LossInputs, clip: Clip) -> PolicyTerm:
    return clipped_term(token_log_ratio(inputs.logprobs, inputs.old_logprobs), inputs.token_advantages, clip)
