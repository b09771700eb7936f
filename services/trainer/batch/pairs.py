"""Two answers to one prompt, of which one is preferred."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.trainer.batch.samples import TrainSample
from services.trainer.objective import best_against_worst


@dataclass(frozen=True)
class Pair:
    chosen: TrainSample
    rejected: TrainSample

    @property
    def samples(self) -> tuple[TrainSample, TrainSample]:
        return self.chosen, self.rejected

    @property
    def forward_length(self) -> int:
        return self.chosen.forward_length + self.rejected.forward_length


def pairs_of(samples: Sequence[TrainSample]) -> list[Pair]:
    """The best and the worst sample of each group by reward, in the order of the groups; without variance, none."""
    numbers: dict[str, int] = {}
    groups = [numbers.setdefault(sample.group_id, len(numbers)) for sample in samples]
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    return [
        Pair(samples[chosen], samples[rejected])
        for chosen, rejected in best_against_worst(rewards, torch.tensor(groups)).tolist()
    ]
