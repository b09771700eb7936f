"""Algorithms by name, and a user's own by import path."""

from collections.abc import Callable
from importlib import import_module

from services.trainer.objective.algorithms.base import Algorithm, PreferenceAlgorithm
from services.trainer.objective.dpo import dpo_loss
from services.trainer.objective.policy_term import (
    Clip,
    PolicyTerm,
    cispo_term,
    clipped_term,
    sequence_log_ratio,
    token_log_ratio,
)
from services.trainer.objective.types import LossInputs
from services.trainer.objective.value import ValueLoss


def ppo() -> Algorithm:
    """Proximal Policy Optimization: a critic values every token, in place of a group of samples.

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


def grpo() -> Algorithm:
    """Group Relative Policy Optimization: PPO's clipped term, each sequence with the same say whatever its length.

    DeepSeekMath, arXiv 2402.03300, equation 3. The paper leaves the clip range open; 0.2 is PPO's.
    """
    return Algorithm("grpo", clipped_token_term, aggregation="sequence_mean", clip_low=0.2, clip_high=0.2)


def clipped_token_term(inputs: LossInputs, clip: Clip) -> PolicyTerm:
    return clipped_term(token_log_ratio(inputs.logprobs, inputs.old_logprobs), inputs.token_advantages, clip)


def dr_grpo() -> Algorithm:
    """GRPO done right: a constant divisor, so that no token counts less for standing in a long answer.

    arXiv 2503.20783, section 3.2. Its other half is advantages without division by the standard deviation.
    """
    return Algorithm("dr_grpo", clipped_token_term, aggregation="fixed_length", clip_low=0.2, clip_high=0.2)


def dapo() -> Algorithm:
    """Decoupled clip: more room upwards, where unlikely tokens gain probability, and each token with the same say.

    arXiv 2503.14476, equation 8 and section 4.1, with dynamic sampling (section 3.2). What answers pay that ran out of
    room (3.4) is a choice of its own: overlong_penalty and LossInputs.truncated.
    """
    return Algorithm(
        "dapo", clipped_token_term, aggregation="token_mean", clip_low=0.2, clip_high=0.28, dynamic_sampling=True
    )


def gspo() -> Algorithm:
    """Group Sequence Policy Optimization: ratio and clip belong to the sequence, as the reward does.

    arXiv 2507.18071, equation 5 and section 5.1. A mean moves far less than a single token does, hence the tiny range.
    """
    return Algorithm("gspo", clipped_sequence_term, aggregation="sequence_mean", clip_low=3e-4, clip_high=4e-4)


def clipped_sequence_term(inputs: LossInputs, clip: Clip) -> PolicyTerm:
    log_ratio = sequence_log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.sequence_ids, inputs.sequences)
    return clipped_term(log_ratio, inputs.token_advantages, clip)


def cispo() -> Algorithm:
    """Clipped importance weight: rare tokens that the policy has already moved still teach it.

    MiniMax-M1 report, arXiv 2506.13585, equation 4. The report sets no lower bound, hence clip_low 1, and tunes the
    upper one; a weight of at most 5 is a choice made here.
    """
    return Algorithm("cispo", clipped_weight_term, aggregation="token_mean", clip_low=1.0, clip_high=4.0)


def clipped_weight_term(inputs: LossInputs, clip: Clip) -> PolicyTerm:
    log_ratio = token_log_ratio(inputs.logprobs, inputs.old_logprobs)
    return cispo_term(inputs.logprobs, log_ratio, inputs.token_advantages, clip)


def dpo() -> PreferenceAlgorithm:
    """Direct Preference Optimization: the better answer of a pair gains on the worse, as far as the reference lets it.

    arXiv 2305.18290, equation 7. Pairs come from a file, or are the best and the worst sample of each scored group.
    """
    return PreferenceAlgorithm("dpo", dpo_loss, beta=0.1)


ALGORITHMS: dict[str, Callable[[], Algorithm | PreferenceAlgorithm]] = {
    "ppo": ppo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "dpo": dpo,
}


def find_algorithm(name: str) -> Algorithm | PreferenceAlgorithm:
    """The algorithm of that name, or what `module:function`, called without arguments, returns.

    Raises ValueError that lists the known names, or says what is wrong with the import path.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]()
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ValueError(f"algorithm.name is {name!r}, expected one of {', '.join(ALGORITHMS)}, or module:function")
    try:
        factory = getattr(import_module(module), function)
        found = factory() if callable(factory) else factory
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"algorithm.name is {name!r}, expected module:function that can be imported and called ({reason})"
        ) from error
    if not isinstance(found, Algorithm | PreferenceAlgorithm):
        raise ValueError(
            f"algorithm.name is {name!r}, expected a function that returns an Algorithm or PreferenceAlgorithm: "
            f"{found!r}"
        )
    return found
