"""What an engine does, by what its users need of it. Every method is collective: all ranks call it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from services.trainer.batch.model_facts import ModelFacts
from services.trainer.batch.packing import PackedBatch
from services.trainer.export.tensors import WeightSource
from services.trainer.model.routing_replay import RoutingAgreement
from services.trainer.model.sharding import Sharding

Reduction = Literal["sum", "min", "max"]


@dataclass(frozen=True)
class PolicyOutput:
    """Of one micro-batch's completion tokens."""

    logprobs: Float[Tensor, "tokens"]
    # Of the distribution over the candidate set, in nats; detached unless their gradient was asked for.
    entropies: Float[Tensor, "tokens"]
    # None where no routing was captured.
    agreement: RoutingAgreement | None
    # Before each token is chosen; None without a value head.
    values: Float[Tensor, "tokens"] | None = None

    def detached(self) -> "PolicyOutput":
        values = None if self.values is None else self.values.detach()
        return PolicyOutput(self.logprobs.detach(), self.entropies.detach(), self.agreement, values)


@dataclass(frozen=True)
class StepResult:
    # False: a gradient was not finite on some rank, so no rank changed its parameters.
    applied: bool
    # Of the global gradient, before clipping; not finite when the step was skipped.
    grad_norm: float
    learning_rate: float


class LogProbEngine(Protocol):
    """Holds a policy."""

    @property
    def device(self) -> torch.device: ...

    @property
    def facts(self) -> ModelFacts: ...

    def logprobs(self, batch: PackedBatch, *, keep_routing: bool = True) -> PolicyOutput:
        """Without gradients."""
        ...


class UpdateEngine(LogProbEngine, Protocol):
    """Holds policy, optimizer and schedule; what one batch is trained with.

    A step is, on each rank and for as many micro-batches as every other rank has: `forward`, then `backward`, the last
    one with `last`; then `step`. The losses of all micro-batches of all ranks sum to the step's loss.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def sharding(self) -> Sharding | None:
        """How models other than the policy are sharded over the ranks; None where each rank has its own."""
        ...

    @property
    def steps_applied(self) -> int: ...

    def forward(self, batch: PackedBatch, *, keep_routing: bool = True, entropy_gradient: bool = False) -> PolicyOutput:
        """With gradients, of the entropies only with `entropy_gradient`.

        Exactly one `backward` must follow before the next `forward` or `logprobs`.
        """
        ...

    def backward(self, loss: Float[Tensor, ""], *, last: bool) -> None: ...

    def step(self) -> StepResult: ...

    def all_reduce(self, values: Tensor, operation: Reduction) -> Tensor:
        """A new tensor where `values` is; every rank passes the same shape and dtype."""
        ...


class RerunEngine(UpdateEngine, Protocol):
    """Takes up a state that was saved, and tells whether it is the same as another."""

    def load(self, directory: Path) -> None:
        """Exactly what was saved, by any number of ranks.

        A rank for which no random state was saved takes one that follows from rank 0's and its own number.
        Raises InvalidData where `directory` is damaged or incomplete, or of another model or dtype, or where one of the
        two is ZeRO-3 and the other is not.
        """
        ...

    def state_digest(self) -> str:
        """Of every bit that decides the training to come: fp32 parameters, optimizer state, `steps_applied`.

        The same on every rank. Only digests of one number of ranks and one ZeRO stage can be compared.
        """
        ...


class TrainEngine(RerunEngine, Protocol):
    """All that a run needs: checks, checkpoints, and policies to publish."""

    def finite(self) -> bool:
        """Whether every parameter and all optimizer state is finite, on all ranks, and no parameter beyond float16."""
        ...

    def save(self, directory: Path) -> None:
        """Parameters, optimizer, schedule and each rank's random state, exactly."""
        ...

    def export(self, directory: Path) -> None:
        """A Hugging Face checkpoint that transformers and vLLM load, tokenizer included."""
        ...

    def weight_source(self) -> WeightSource:
        """The policy's tensors as `export` writes them; made alike on every rank. Raises InvalidData."""
        ...

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's `data` on every rank; the others pass None."""
        ...

    def barrier(self) -> None: ...

    def close(self) -> None: ...
