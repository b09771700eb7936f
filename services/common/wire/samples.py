"""What every service requires of a sample."""

import math

import numpy as np
from trivet.v1 import sample_pb2

from services.common.errors import InvalidData

# Log-softmax may round a probability to slightly more than 1.
MAX_LOGPROB = 1e-3
# No sampler draws what is less likely than this: float32 ends at e^-104.
MIN_LOGPROB = -1e3


def sample_id(prompt: sample_pb2.Prompt, index: int) -> str:
    """Unique in the run, also where the group is requested again; the same again for a redelivery."""
    return f"{prompt.group_id}/{prompt.attempt}/{index}"


def check_logprobs(sample: sample_pb2.Sample, field: str) -> None:
    """Raises InvalidData unless each token has a log-prob that can be one. `field` names the sample."""
    logprobs = sample.logprobs
    if len(logprobs) != len(sample.token_ids):
        raise InvalidData(
            "logprobs_rows",
            f"{field}.logprobs has {len(logprobs)} values, expected {len(sample.token_ids)}, one a token",
        )
    values = np.asarray(logprobs)
    # The least and the greatest of anything with a NaN in it is NaN, which lies in no range.
    if not len(values) or (values.min() >= MIN_LOGPROB and values.max() <= MAX_LOGPROB):
        return
    for position, logprob in enumerate(logprobs):
        name = f"{field}.logprobs[{position}]"
        if not math.isfinite(logprob):
            raise InvalidData("logprob_not_finite", f"{name} is {logprob}, expected a finite number")
        if not MIN_LOGPROB <= logprob <= MAX_LOGPROB:
            raise InvalidData("logprob_out_of_range", f"{name} is {logprob:g}, expected {MIN_LOGPROB:g} to 0")
