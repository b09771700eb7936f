"""An algorithm of your own, for `algorithm.name: examples.own_algorithm:mixed_ratio`.

GRPO clips the ratio of each token, GSPO the one of the whole sequence. This one clips their geometric mean: a token
whose ratio is noise is held by its sequence, and the sequence does not hide a token that moved far.
"""

from services.trainer.objective import (
    Algorithm,
    Clip,
    LossInputs,
    PolicyTerm,
    clipped_term,
    sequence_log_ratio,
    token_log_ratio,
)


def mixed_ratio() -> Algorithm:
    """Trivet calls it without arguments; what the YAML sets (`algorithm.clip_low`, …) replaces these defaults."""
    return Algorithm("mixed_ratio", mixed_term, aggregation="sequence_mean", clip_low=0.1, clip_high=0.1)


def mixed_term(inputs: LossInputs, clip: Clip) -> PolicyTerm:
    token = token_log_ratio(inputs.logprobs, inputs.old_logprobs)
    sequence = sequence_log_ratio(inputs.logprobs, inputs.old_logprobs, inputs.sequence_ids, inputs.sequences)
    return clipped_term((token + sequence) / 2, inputs.token_advantages, clip)
