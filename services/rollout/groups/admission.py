"""Whether a prompt can be sampled at all. What is refused here would be refused again: it goes to the dead letters."""

import re

from trivet.v1 import sample_pb2

from services.common.config.sampling_limits import MAX_GROUP_SIZE, MAX_TEMPERATURE, MIN_TEMPERATURE, as_float32
from services.common.errors import InvalidData
from services.rollout.engine.protocol import Engine

# Sample i of a group is drawn with seed + i, and a generator takes no more.
MAX_SEED = 2**63 - 1 - MAX_GROUP_SIZE
_GROUP_ID = re.compile(r"[\x21-\x7e]{1,128}")


def is_captured(prompt: sample_pb2.Prompt) -> bool:
    """Evaluation samples are only scored, so they need no replay data."""
    return prompt.purpose != sample_pb2.PURPOSE_EVALUATION


def check_prompt(prompt: sample_pb2.Prompt, engine: Engine) -> None:
    """Raises InvalidData that names the field, its value and what was expected."""
    # It becomes a part of file names and keys.
    if not _GROUP_ID.fullmatch(prompt.group_id):
        raise InvalidData(
            "group_id", f"group_id is {prompt.group_id!r}, expected 1 to 128 ASCII characters without spaces"
        )
    if not 1 <= prompt.group_size <= MAX_GROUP_SIZE:
        raise InvalidData("group_size", f"group_size is {prompt.group_size}, expected 1 to {MAX_GROUP_SIZE}")
    _check_tokens(prompt, engine)
    _check_sampling(prompt.sampling, captured=is_captured(prompt))
    if reason := engine.refusal(prompt.sampling, is_captured(prompt)):
        raise InvalidData("sampling_unsupported", reason)


def _check_tokens(prompt: sample_pb2.Prompt, engine: Engine) -> None:
    length, limit = len(prompt.token_ids), engine.max_length
    if length == 0:
        raise InvalidData("prompt_empty", "token_ids is empty, expected at least one token")
    if prompt.sampling.max_tokens < 1:
        raise InvalidData("max_tokens", f"sampling.max_tokens is {prompt.sampling.max_tokens}, expected at least 1")
    if length + prompt.sampling.max_tokens > limit:
        raise InvalidData(
            "prompt_too_long",
            f"token_ids has {length} tokens and sampling.max_tokens is {prompt.sampling.max_tokens}, "
            f"expected at most {limit} together (model.max_length)",
        )
    low, high = min(prompt.token_ids), max(prompt.token_ids)
    if low < 0 or high >= engine.vocabulary:
        raise InvalidData(
            "token_out_of_range",
            f"token_ids holds {low if low < 0 else high}, expected 0 to {engine.vocabulary - 1}",
        )


def _check_sampling(sampling: sample_pb2.SamplingParameters, *, captured: bool) -> None:
    temperature, top_p = sampling.temperature, sampling.top_p
    if not (temperature == 0 or as_float32(MIN_TEMPERATURE) <= temperature <= MAX_TEMPERATURE):
        raise InvalidData(
            "sampling_unsupported",
            f"sampling.temperature is {temperature:g}, expected 0 or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
        )
    if captured and temperature == 0:
        raise InvalidData(
            "sampling_unsupported",
            "sampling.temperature is 0, expected more: a greedy sample has no distribution to train on",
        )
    if not 0 < top_p <= 1:
        raise InvalidData("sampling_unsupported", f"sampling.top_p is {top_p:g}, expected more than 0 and at most 1")
    if sampling.HasField("seed") and sampling.seed > MAX_SEED:
        raise InvalidData("sampling_unsupported", f"sampling.seed is {sampling.seed}, expected at most {MAX_SEED}")
