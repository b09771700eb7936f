"""Where rank 0's training loop gets its steps from: rollouts through Redis, or a file of preference pairs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trivet.v1 import step_pb2

from services.trainer.batch.samples import TrainSample
from services.trainer.checkpoint.directory import TrainerState
from services.trainer.steps.status import Controls, Status


@dataclass(frozen=True)
class Order:
    """What all ranks do next. `samples` are those of the message's groups where they have been decoded already: on
    rank 0, which checks what arrives by decoding it.
    """

    message: step_pb2.StepOrder
    samples: Sequence[TrainSample] = ()


class StepSource(Protocol):
    # The number of finished steps, which is also the newest policy version.
    step: int

    @property
    def status(self) -> Status: ...

    @property
    def controls(self) -> Controls: ...

    @property
    def history(self) -> str:
        """The first part of every group id; it is kept in checkpoints."""
        ...

    @property
    def data_version(self) -> str: ...

    def restore(self, state: TrainerState) -> None: ...

    def issue(self) -> None:
        """Issues as much as the run may issue at this step."""
        ...

    def next_order(self) -> Order:
        """What all ranks do next; WAIT at least once a second. Raises Unavailable when nothing comes any more."""
        ...

    def evaluate(self) -> dict[str, float] | None:
        """Metrics on held-out prompts, where that takes no engine; None when there are none or the run was stopped."""
        ...

    def held_out(self) -> Order:
        """Pairs for the engine to evaluate; empty if `evaluate` does all of it."""
        ...

    def dump(self) -> dict[str, Any]:
        """For the checkpoint: what `restore` reads."""
        ...

    def commit(self) -> None:
        """The checkpoint is durable: what it holds need not be kept any longer."""
        ...
