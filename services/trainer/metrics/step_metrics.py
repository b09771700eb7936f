"""What an update reports of a step."""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

import torch

from services.trainer.objective import LossOutputs, Metrics

StepMetrics = dict[str, float]
Item = TypeVar("Item")

# Metrics that compare the sampler with the trainer mean something only before the first update.
SAMPLER_AGAINST_TRAINER = (
    "logprob_difference_mean",
    "logprob_difference_max",
    "sampler_ratio_mean",
    "routing_agreement",
    "mismatch_kl",
    *(f"policy_ratio{suffix}" for suffix in ("", "_min", "_max", "_p1", "_p50", "_p99", "_p999")),
)


def empty(outputs: LossOutputs) -> LossOutputs:
    """Of a repeat that only keeps the ranks in step."""
    metrics = outputs.metrics
    return LossOutputs(
        outputs.loss * 0.0,
        Metrics(
            totals={name: torch.zeros_like(value) for name, value in metrics.totals.items()},
            means={name: torch.zeros_like(value) for name, value in metrics.means.items()},
            minima={name: torch.full_like(value, math.inf) for name, value in metrics.minima.items()},
            maxima={name: torch.full_like(value, -math.inf) for name, value in metrics.maxima.items()},
        ),
    )


def split(items: Sequence[Item], parts: int) -> list[Sequence[Item]]:
    """Into `parts` mini-batches of neighbours, the larger ones first, whose sizes differ by one at most.

    Of fewer items than parts each is its own.
    """
    size, larger = divmod(len(items), parts)
    ends = accumulate((size + (part < larger) for part in range(min(parts, len(items)))), initial=0)
    return [items[start:end] for start, end in pairwise(ends)]
