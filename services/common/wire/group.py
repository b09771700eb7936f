"""A group of samples: what every service that takes one requires of it."""

import math

import numpy as np
from trivet.v1 import sample_pb2

from services.common.errors import InvalidData

# Log-softmax may round a probability to slightly more than 1.
MAX_LOGPROB = 1e-3
# No sampler draws what is less likely than this: float32 ends at e^-104.
MIN_LOGPROB = -1e3


def sample_id(prompt: sample_pb2.Prompt, index: int) -> str:
    """Unique in the run, also across re-issues; the same again for a redelivery."""
    return f"{prompt.group_id}/{prompt.attempt}/{index}"


def check_group(group: sample_pb2.Group) -> None:
    """Raises InvalidData unless each sample is there once, under its own id, with a log-prob for each token."""
    name, count = group.prompt.group_id, len(group.samples)
    if not name:
        raise InvalidData("group_id", "prompt.group_id is empty, expected one that is unique in the run")
    # A caller who has a group scored directly need not say its size.
    size = group.prompt.group_size or count
    if not count or count != size:
        raise InvalidData("group_size", f"group {name} has {count} samples, expected {size or 'at least one'}")
    indices = [sample.index for sample in group.samples]
    if sorted(indices) != list(range(size)):
        raise InvalidData("sample_index", f"samples of group {name} have index {indices[:8]}, expected 0 to {size - 1}")
    for sample in group.samples:
        own_id = sample_id(group.prompt, sample.index)
        if sample.sample_id != own_id:
            raise InvalidData("sample_id", f"sample_id is {sample.sample_id[:200]!r}, expected {own_id!r}")
        _check_logprobs(sample)


def _check_logprobs(sample: sample_pb2.Sample) -> None:
    name, logprobs = f"logprobs of sample {sample.sample_id}", sample.logprobs
    if len(logprobs) != len(sample.token_ids):
        raise InvalidData(
            "logprobs_rows", f"{name} are {len(logprobs)} values, expected {len(sample.token_ids)}, one a token"
        )
    values = np.asarray(logprobs)
    # The least and the greatest of anything with a NaN in it is NaN, which lies in no range.
    if not len(values) or (values.min() >= MIN_LOGPROB and values.max() <= MAX_LOGPROB):
        return
    for position, logprob in enumerate(logprobs):
        if not math.isfinite(logprob):
            raise InvalidData("logprob_not_finite", f"{name}: [{position}] is {logprob}, expected a finite number")
        if not MIN_LOGPROB <= logprob <= MAX_LOGPROB:
            raise InvalidData(
                "logprob_out_of_range", f"{name}: [{position}] is {logprob:g}, expected {MIN_LOGPROB:g} to 0"
            )
