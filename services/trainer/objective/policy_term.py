"""What a token adds to the policy loss, before masks, importance weights and aggregation."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class Clip:
    """The ratio is trusted in [1 − low, 1 + high]. Raises ValueError for low outside 0..1 or a negative high."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1:
            raise ValueError(f"clip_low is {self.low}, expected 0 to 1")
        if not self.high >= 0:
            raise ValueError(f"clip_high is {self.high}, expected 0 or more")

    def __call__(self, ratio: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
        return ratio.clamp(1 - self.low, 1 + self.high)


@dataclass(frozen=True, eq=False)
class PolicyTerm:
    loss: Float[Tensor, "N"]
    ratio: Float[Tensor, "N"]  # before clipping
    clipped: Bool[Tensor, "N"]  # where clipping changed the term


def clipped_term(ratio: Float[Tensor, "N"], advantages: Float[Tensor, "N"], clip: Clip) -> PolicyTerm:
    """−min(r·A, clip(r)·A): no gradient once the ratio has left the interval in the advantage's direction.

    PPO, arXiv 1707.06347, equation 7; with its own upper bound (clip-higher), DAPO, arXiv 2503.14476, equation 10.
    """
    free, bounded = ratio * advantages, clip(ratio) * advantages
    return PolicyTerm(loss=-torch.minimum(free, bounded), ratio=ratio, clipped=bounded < free)


def cispo_term(
    logprobs: Float[Tensor, "N"], ratio: Float[Tensor, "N"], advantages: Float[Tensor, "N"], clip: Clip
) -> PolicyTerm:
    """−stopgrad(clip(r))·A·lp: every token keeps its gradient, only its weight is bounded.

    CISPO, MiniMax-M1 report, arXiv 2506.13585, equation 4.
    """
    weight = clip(ratio).detach()
    return PolicyTerm(loss=-weight * advantages * logprobs, ratio=ratio, clipped=weight != ratio)
