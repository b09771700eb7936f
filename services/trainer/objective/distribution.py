"""Distributions of ratios that micro-batches and ranks can add up."""

import math
from collections.abc import Mapping

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


def histogram_of(ratio: Float[Tensor, "N"]) -> Float[Tensor, "B"]:
    """Counts of non-negative ratios, in float64, over bins that are the same everywhere; NaN counts as the largest."""
    position = torch.asinh(ratio.detach().double().log() / FINEST) * BINS_PER_UNIT
    bins = position.nan_to_num(nan=SIDE, posinf=SIDE, neginf=-SIDE).round().clamp(-SIDE, SIDE).long() + SIDE
    return segment_sum(torch.ones_like(position), bins, BINS)


def quantiles_of(histogram: Float[Tensor, "B"]) -> dict[str, float]:
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
