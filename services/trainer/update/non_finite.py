"""Numbers of a step that are not finite: whose they are, and that no rank then takes the optimizer step."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from services.trainer.batch.packing import PackedBatch
from services.trainer.batch.samples import TrainSample
from services.trainer.engine.protocol import PolicyOutput, UpdateEngine

Reason = Literal["forward", "loss", "gradient"]
# The graver one counts where ranks differ.
FINE, LOSS, FORWARD = 0, 1, 2


@dataclass(frozen=True)
class Skipped:
    """An optimizer step that changed nothing, and the samples that caused it; for a gradient, all of the step's."""

    reason: Reason
    samples: tuple[str, ...]


class FiniteCheck:
    """Over the samples of one optimizer step. Each rank checks its own micro-batches; `shared` is collective."""

    def __init__(self, samples: Sequence[TrainSample], engine: UpdateEngine) -> None:
        """The same samples in the same order on every rank."""
        self.samples, self._engine = samples, engine
        self._ids = tuple(sample.sample_id for sample in samples)
        self._positions = {sample_id: index for index, sample_id in enumerate(self._ids)}
        self._found = torch.full((len(self._ids),), FINE, dtype=torch.float64)

    def numbers(self, batch: PackedBatch, *numbers: Float[Tensor, "tokens"] | None) -> bool:
        """True where all are finite; else the samples of those that are not are noted."""
        given = [each.detach().isfinite() for each in numbers if each is not None]
        finite = torch.stack(given).all(0)
        if bool(finite.all()):
            return True
        self._note([batch.sample_ids[index] for index in sorted(set(batch.sequence_ids[~finite].tolist()))], FORWARD)
        return False

    def loss(self, batch: PackedBatch, loss: Float[Tensor, ""]) -> bool:
        """True where it is finite; else all samples of the micro-batch are noted."""
        if bool(loss.detach().isfinite()):
            return True
        self._note(batch.sample_ids, LOSS)
        return False

    def shared(self) -> Skipped | None:
        """What any rank has noted; None where all numbers were finite."""
        found = self._engine.all_reduce(self._found.to(self._engine.device), "max").tolist()
        worst = max(found)
        if worst == FINE:
            return None
        samples = tuple(sample for sample, grade in zip(self._ids, found, strict=True) if grade == worst)
        return Skipped("forward" if worst == FORWARD else "loss", samples)

    def gradient(self) -> Skipped:
        return Skipped("gradient", self._ids)

    def _note(self, sample_ids: Iterable[str], grade: int) -> None:
        for sample_id in sample_ids:
            position = self._positions[sample_id]
            self._found[position] = max(self._found[position].item(), grade)


def spoiled(output: PolicyOutput) -> Float[Tensor, ""]:
    """A loss for `backward` after which no rank's `step` changes anything: the ranks' collectives stay in step."""
    parts = [output.logprobs] if output.values is None else [output.logprobs, output.values]
    return torch.stack([part.sum() for part in parts]).sum() * math.nan
