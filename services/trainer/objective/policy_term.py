"""What a token adds to the policy loss, before masks, importance weights and aggregation."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from services.trainer.objective.scaled import wide_exp
from services.trainer.objective.segments import segment_mean


def token_log_ratio(
    logprobs: Float[Tensor, "tokens"], old_logprobs: Float[Tensor, "tokens"]
) -> Float[Tensor, "tokens"]:
    """log r = lp − old, token by token (PPO, arXiv 1707.06347, section 3)."""
    return logprobs - old_logprobs


def sequence_log_ratio(
    logprobs: Float[Tensor, "tokens"],
    old_logprobs: Float[Tensor, "tokens"],
    sequence_ids: Int[Tensor, "tokens"],
    sequences: int,
) -> Float[Tensor, "tokens"]:
    """log r = mean of lp − old over the sequence, the same for each of its tokens.

    GSPO, arXiv 2507.18071, equation 7. Gradient reaches every token through the mean, so a token whose own term is
    weighted zero still learns from its neighbours'.
    """
    return segment_mean(logprobs - old_logprobs, sequence_ids, sequences)[sequence_ids]


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

    def __call__(self, ratio: Float[Tensor, "tokens"]) -> Float[Tensor, "tokens"]:
        return ratio.clamp(1 - self.low, 1 + self.high)


@dataclass(frozen=True, eq=False)
class PolicyTerm:
    loss: Float[Tensor, "tokens"]
    ratio: Float[Tensor, "tokens"]  # before clipping; in float64 where it would overflow
    clipped: Bool[Tensor, "tokens"]  # where clipping changed the term
    # The term is loss · exp(log_scale): 0, or None for 0 everywhere, unless the ratio makes it overflow.
    log_scale: Float[Tensor, "tokens"] | None = None


def clipped_term(log_ratio: Float[Tensor, "tokens"], advantages: Float[Tensor, "tokens"], clip: Clip) -> PolicyTerm:
    """−min(r·A, clip(r)·A): no gradient once the ratio has left the interval in the advantage's direction.

    PPO, arXiv 1707.06347, equation 7; with its own upper bound (clip-higher), DAPO, arXiv 2503.14476, equation 10.
    """
    raw = log_ratio.detach().exp()
    far = ~(raw * advantages).isfinite()
    # Selected before exp: an infinity that is left out afterwards would still turn its zero gradient into NaN.
    ratio = log_ratio.where(~far, 0.0).exp()
    free, bounded = ratio * advantages, clip(ratio) * advantages
    loss, clipped, log_scale = -torch.minimum(free, bounded), bounded < free, torch.zeros_like(raw)
    gains = far & (advantages >= 0)
    loses = far & (advantages < 0)
    loss = loss.where(~gains, -clip(raw) * advantages)
    loss = loss.where(~loses, -advantages * (log_ratio - log_ratio.detach()).exp())
    return PolicyTerm(
        loss=loss,
        ratio=wide_exp(log_ratio),
        clipped=clipped.where(~far, advantages > 0),
        log_scale=log_scale.where(~loses, log_ratio.detach()),
    )


def cispo_term(
    logprobs: Float[Tensor, "tokens"],
    log_ratio: Float[Tensor, "tokens"],
    advantages: Float[Tensor, "tokens"],
    clip: Clip,
) -> PolicyTerm:
    """−stopgrad(clip(r))·A·lp: every token keeps its gradient, only its weight is bounded.

    CISPO, MiniMax-M1 report, arXiv 2506.13585, equation 4.
    """
    ratio = log_ratio.detach().exp()
    weight = clip(ratio)
    return PolicyTerm(loss=-weight * advantages * logprobs, ratio=wide_exp(log_ratio), clipped=weight != ratio)
