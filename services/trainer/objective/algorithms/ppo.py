from services.trainer.objective.algorithms.algorithm import Algorithm
from services.trainer.objective.policy_term import Clip, PolicyTerm, clipped_term
from services.trainer.objective.ratio import token_log_ratio
from services.trainer.objective.types import LossInputs
from services.trainer.objective.value import ValueLoss


def ppo() -> Algorithm:
    """Proximal Policy Optimization: a value head judges every token, in place of a group of samples.

    arXiv 1707.06347, equations 7 and 9, with advantages by GAE, arXiv 1506.02438. The value's half weight and its clip
    are PPO2's. No entropy bonus unless asked for: over a vocabulary it soon outgrows the rest.
    """
    return Algorithm(
        "ppo", clipped_gae_term, aggregation="token_mean", clip_low=0.2, clip_high=0.2, value=ValueLoss(0.5, 0.2)
    )


def clipped_gae_term(inputs: LossInputs, clip: Clip) -> PolicyTerm:
    """Raises ValueError without gae_advantages."""
    advantages = inputs.require("gae_advantages", "ppo gives each token its own")
    return clipped_term(token_log_ratio(inputs.logprobs, inputs.old_logprobs), advantages, clip)
