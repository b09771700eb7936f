"""The frozen reference of the KL term."""

from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from services.trainer.packing import PackedBatch
from services.trainer.policy import Policy, load_policy


class Reference:
    """Log-probs under weights that never change.

    It sees what the policy sees: the sampler's routing and the sampler's candidate sets, at the sampler's temperature,
    so that the KL term compares two distributions over the same set.
    """

    def __init__(self, policy: Policy, device: torch.device) -> None:
        self._policy = policy.eval().requires_grad_(False).to(device)

    def logprobs(self, batch: PackedBatch, *, keep_routing: bool = True) -> Float[Tensor, "tokens"]:
        with torch.no_grad():
            logprobs, _ = self._policy(batch, keep_routing=keep_routing)
        result: Tensor = logprobs
        return result


def load_reference(
    path: str | Path, *, dtype: Literal["float32", "bfloat16"], device: torch.device, keep_routing: bool = True
) -> Reference:
    """Raises InvalidData as load_policy does."""
    return Reference(load_policy(str(path), dtype=dtype, keep_routing=keep_routing), device)
