"""What vLLM reports of a sampled token, as the log-prob that the token was sampled with.

    mode                reported of each token        as sampled
    processed_logprobs  after temperature and masks   the same
    processed_logits    after temperature and masks   less the logsumexp of the row, excluded tokens at −inf
    raw_logprobs        before either                 / temperature, then the same (a constant cancels)
    raw_logits          before either                 / temperature, then the same

Raw values do not tell which tokens were excluded, so they are refused where sampling truncates (config: sampling).
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32

from services.common.wire.tensors import Array

LogprobsMode = Literal["processed_logprobs", "raw_logprobs", "processed_logits", "raw_logits"]


@dataclass(frozen=True)
class Reported:
    mode: LogprobsMode
    # The sampler's; 0 is greedy decoding, whose log-probs are those at temperature 1.
    temperature: float

    @property
    def whole_rows(self) -> bool:
        """Whether the sampled token's own value is not enough, so that the whole vocabulary's values are needed."""
        return self.mode != "processed_logprobs" and not (self.mode == "raw_logprobs" and self._scale == 1)

    @property
    def logprobs(self) -> int:
        """vLLM's SamplingParams.logprobs: how many tokens to report in addition to the sampled one, −1 for all."""
        return -1 if self.whole_rows else 0

    @property
    def _scale(self) -> float:
        return self.temperature if self.mode.startswith("raw") and self.temperature > 0 else 1.0

    def as_sampled(self, flat: Any) -> Float32[Array, "completion"]:
        """Of vLLM's FlatLogprobs, in which the sampled token is the first entry of its position."""
        if not self.whole_rows:
            return np.asarray([flat.logprobs[start] for start in flat.start_indices], dtype=np.float32)
        found = []
        for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
            values = np.asarray(flat.logprobs[start:end], dtype=np.float64) / self._scale
            # Behind the sampled token comes the whole row, the sampled token in it once more.
            row = values[1:]
            most = row.max()
            found.append(values[0] - most - np.log(np.exp(row - most).sum()))
        return np.asarray(found, dtype=np.float32)
