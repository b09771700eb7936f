from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from services.common.errors import InvalidData
from services.common.wire.replay_data import Replay

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TrainSample:
    """One scored sample as the model side needs it: P prompt tokens and C completion tokens, both at least one.

    `temperature` is the sampler's. Raises InvalidData at construction where the arrays do not fit together.
    """

    sample_id: str
    prompt_token_ids: Int32[Array, "prompt"]
    token_ids: Int32[Array, "completion"]
    rollout_logprobs: Float32[Array, "completion"]
    replay: Replay
    # Not finite where rewards are too far apart: such a step is skipped.
    advantage: float
    temperature: float = 1.0
    reward: float = 0.0
    # Of the samples that answer the same request.
    group_id: str = ""
    # Cut off at max_tokens.
    truncated: bool = False
    # What it might have had, as its prompt was issued; 0 where nobody sampled it.
    max_tokens: int = 0

    def __post_init__(self) -> None:
        if len(self.prompt_token_ids) == 0 or len(self.token_ids) == 0:
            raise InvalidData(
                "sample_empty",
                f"sample {self.sample_id} has {len(self.prompt_token_ids)} prompt and {len(self.token_ids)} completion "
                "tokens, expected at least one of each",
            )
        if len(self.rollout_logprobs) != len(self.token_ids):
            raise InvalidData(
                "logprobs_rows",
                f"rollout_logprobs of {self.sample_id} has {len(self.rollout_logprobs)} rows, "
                f"expected {len(self.token_ids)}",
            )
        if not np.isfinite(self.rollout_logprobs).all():
            raise InvalidData("logprob_not_finite", f"a log-prob of {self.sample_id} is not finite")
        if not np.isfinite(self.reward):
            raise InvalidData("reward_not_finite", f"reward of {self.sample_id} is {self.reward}, expected finite")
        if not (np.isfinite(self.temperature) and self.temperature > 0):
            raise InvalidData(
                "temperature", f"temperature of {self.sample_id} is {self.temperature}, expected a positive number"
            )

    @property
    def forward_length(self) -> int:
        """Tokens that go through the model: the last completion token is predicted, never fed."""
        return len(self.prompt_token_ids) + len(self.token_ids) - 1
