"""What the training loop asks of an engine. Every method is collective: all ranks call it alike."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from services.trainer.packing import PackedBatch
from services.trainer.policy import ModelFacts
from services.trainer.routing import RoutingAgreement

Reduction = Literal["sum", "min", "max"]


@dataclass(frozen=True)
class PolicyOutput:
    """N completion tokens of one micro-batch."""

    logprobs: Float[Tensor, "tokens"]
    # Of the distribution over the candidate set, in nats; detached unless their gradient was asked for.
    entropies: Float[Tensor, "tokens"]
    # None where no routing was recorded.
    agreement: RoutingAgreement | None
    # Before each token is chosen; None without a value head.
    values: Float[Tensor, "tokens"] | None = None


@dataclass(frozen=True)
class StepResult:
    # False: a gradient was not finite on some rank, so no rank changed its parameters.
    applied: bool
    # Of the global gradient, before clipping; not finite when the step was skipped.
    grad_norm: float
    learning_rate: float


class TrainEngine(Protocol):
    """Holds policy, optimizer and schedule.

    A step is, on each rank and for as many micro-batches as every other rank has: `forward`, then `backward`, the last
    one with `last`; then `step`. The losses of all micro-batches of all ranks sum to the step's loss.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def facts(self) -> ModelFacts: ...

    @property
    def steps_applied(self) -> int: ...

    def logprobs(self, batch: PackedBatch, *, keep_routing: bool = True) -> PolicyOutput:
        """Without gradients."""
        ...

    def forward(self, batch: PackedBatch, *, keep_routing: bool = True, entropy_gradient: bool = False) -> PolicyOutput:
        """With gradients, of the entropies only with `entropy_gradient`.

        Exactly one `backward` must follow before the next `forward` or `logprobs`.
        """
        ...

    def backward(self, loss: Float[Tensor, ""], *, last: bool) -> None: ...

    def step(self) -> StepResult: ...

    def save(self, directory: Path) -> None:
        """Parameters, optimizer, schedule and each rank's random state, exactly."""
        ...

    def load(self, directory: Path) -> None:
        """Raises InvalidData where `directory` is incomplete or of another model, dtype, ZeRO stage or world size."""
        ...

    def export(self, directory: Path) -> None:
        """A Hugging Face checkpoint that transformers and vLLM load, tokenizer included."""
        ...

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's `data` on every rank; the others pass None."""
        ...

    def all_reduce(self, values: Tensor, operation: Reduction) -> Tensor:
        """A new tensor where `values` is; every rank passes the same shape and dtype."""
        ...

    def barrier(self) -> None: ...

    def close(self) -> None: ...
