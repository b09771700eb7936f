"""Numbers about a loss that stay exact when a step is split over micro-batches and ranks."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from services.trainer.objective.segments import segment_sum

# Bins of equal width in asinh(log r / FINEST): even steps around r = 1, where an exact sampler leaves its ratios, and
# steps in proportion to |log r| far from it.
FINEST = 1e-3
BINS_PER_UNIT = 64
FARTHEST = 100.0  # in nats: what lies beyond is counted in the bin there
SIDE = math.ceil(math.asinh(FARTHEST / FINEST) * BINS_PER_UNIT)
BINS = 2 * SIDE + 1

QUANTILES: Mapping[str, float] = {"p1": 0.01, "p50": 0.5, "p99": 0.99, "p999": 0.999}


def histogram_of(ratio: Float[Tensor, "tokens"]) -> Float[Tensor, "bins"]:
    """Counts of non-negative ratios, in float64, over bins that are the same everywhere; NaN counts as the largest."""
    position = torch.asinh(ratio.detach().double().log() / FINEST) * BINS_PER_UNIT
    bins = position.nan_to_num(nan=SIDE, posinf=SIDE, neginf=-SIDE).round().clamp(-SIDE, SIDE).long() + SIDE
    return segment_sum(torch.ones_like(position), bins, BINS)


def quantiles_of(histogram: Float[Tensor, "bins"]) -> dict[str, float]:
    """By name in QUANTILES, the smallest ratio that at least this share of all ratios does not exceed; NaN for none.

    For a quantile q up to e^±100, log of the answer is within 0.8 % of (|log q| + 0.001) from log q: half a bin.
    """
    reached = histogram.cpu().cumsum(0)
    total = reached[-1].item()
    if total == 0:
        return dict.fromkeys(QUANTILES, math.nan)
    # The product is rounded up only past its own rounding error; even the lowest share asks for one ratio.
    ranks = torch.tensor([math.ceil(share * total - 1e-6) for share in QUANTILES.values()], dtype=reached.dtype)
    bins = torch.searchsorted(reached, ranks)
    ratios = (((bins - SIDE).double() / BINS_PER_UNIT).sinh() * FINEST).exp().tolist()
    return dict(zip(QUANTILES, ratios, strict=True))


AllReduce = Callable[[Float[Tensor, "numbers"], Literal["sum", "min", "max"]], Float[Tensor, "numbers"]]


@dataclass(frozen=True, eq=False)
class Metrics:
    """Detached scalars by name. Two of them add up to the metrics of both micro-batches together."""

    totals: dict[str, Float[Tensor, ""]]  # shares of the step's value: they add up
    # Sum and count, and behind them, for a distribution, its histogram: all add up, and the quotient is the mean.
    means: dict[str, Float[Tensor, "_sums"]]
    minima: dict[str, Float[Tensor, ""]]
    maxima: dict[str, Float[Tensor, ""]]

    def __add__(self, other: "Metrics") -> "Metrics":
        """Raises KeyError unless both have the same names."""
        return Metrics(
            totals=_merge(self.totals, other.totals, torch.add),
            means=_merge(self.means, other.means, torch.add),
            minima=_merge(self.minima, other.minima, torch.minimum),
            maxima=_merge(self.maxima, other.maxima, torch.maximum),
        )

    def reduce(self, all_reduce: AllReduce) -> "Metrics":
        """The same over all ranks, by three calls of `all_reduce`, which returns the reduced vector."""
        sums = all_reduce(torch.cat([*(t.reshape(1) for t in self.totals.values()), *self.means.values()]), "sum")
        totals, means = sums[: len(self.totals)], sums[len(self.totals) :]
        minima = all_reduce(torch.stack(list(self.minima.values())), "min")
        maxima = all_reduce(torch.stack(list(self.maxima.values())), "max")
        return Metrics(
            totals=dict(zip(self.totals, totals, strict=True)),
            means=dict(zip(self.means, torch.split(means, [len(mean) for mean in self.means.values()]), strict=True)),
            minima=dict(zip(self.minima, minima, strict=True)),
            maxima=dict(zip(self.maxima, maxima, strict=True)),
        )

    def values(self) -> dict[str, float]:
        """Plain numbers: totals and means under their own names, extremes as `<name>_min` and `<name>_max`.

        A distribution adds `<name>_p1`, `_p50`, `_p99` and `_p999`, to the accuracy that `quantiles_of` states and
        never outside the extremes, which are exact.
        """
        return {
            **{name: total.item() for name, total in self.totals.items()},
            **{name: (mean[0] / mean[1]).item() for name, mean in self.means.items()},
            **{f"{name}_min": value.item() for name, value in self.minima.items()},
            **{f"{name}_max": value.item() for name, value in self.maxima.items()},
            **self._quantiles(),
        }

    def _quantiles(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, mean in self.means.items():
            if len(mean) > 2:
                low, high = self.minima[name].item(), self.maxima[name].item()
                found |= {f"{name}_{key}": min(max(q, low), high) for key, q in quantiles_of(mean[2:]).items()}
        return found


def mean_of(values: Tensor) -> Float[Tensor, "2"]:
    """Sum and count of `values`, in float64 so that neither rounds over a long step."""
    total = values.detach().sum(dtype=torch.float64)
    return torch.stack([total, torch.full_like(total, values.numel())])


def distribution_of(ratio: Float[Tensor, "tokens"]) -> Float[Tensor, "sums"]:
    """For a mean with quantiles. Metrics that hold it hold the ratio's minimum and maximum under the same name."""
    return torch.cat([mean_of(ratio), histogram_of(ratio)])


def _merge(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], join: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    if ours.keys() != theirs.keys():
        raise KeyError(f"metrics differ in {sorted(ours.keys() ^ theirs.keys())}, expected the same names")
    return {name: join(value, theirs[name]) for name, value in ours.items()}
