from dataclasses import dataclass

from jaxtyping import Float32, Int32

from services.common.wire.replay_data import Replay
from services.common.wire.tensors import Array


@dataclass(frozen=True)
class TrainSample:
    """One scored sample as the model side needs it: P prompt tokens and C completion tokens, both at least one.

    `temperature` is the sampler's. Whoever makes one has checked that the arrays fit together: batch/groups.py does.
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

    @property
    def forward_length(self) -> int:
        """Tokens that go through the model: the last completion token is predicted, never fed."""
        return len(self.prompt_token_ids) + len(self.token_ids) - 1
