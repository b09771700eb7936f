"""Estimators of KL(current ‖ reference) from one sampled token each."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from services.trainer.objective.scaled import Scaled, unscaled

KlEstimator = Literal["importance_sampling_corrected", "k1", "k2", "k3"]
KL_ESTIMATORS: tuple[KlEstimator, ...] = ("importance_sampling_corrected", "k1", "k2", "k3")


@dataclass(frozen=True)
class KlPenalty:
    """coef · estimator; `clip_ratio` bounds from above the ratio in importance_sampling_corrected, and nothing else.

    Raises ValueError for an unknown estimator, a negative coef and a clip_ratio that is not positive.
    """

    estimator: KlEstimator = "importance_sampling_corrected"
    coef: float = 0.001
    clip_ratio: float = 5.0

    def __post_init__(self) -> None:
        if self.estimator not in KL_ESTIMATORS:
            raise ValueError(f"estimator is {self.estimator!r}, expected one of {', '.join(KL_ESTIMATORS)}")
        if not self.coef >= 0:
            raise ValueError(f"coef is {self.coef}, expected 0 or more")
        if not self.clip_ratio > 0:
            raise ValueError(f"clip_ratio is {self.clip_ratio}, expected more than 0")


def k1(logprobs: Float[Tensor, "tokens"], reference: Float[Tensor, "tokens"]) -> Float[Tensor, "tokens"]:
    """lp − ref: unbiased in value, high variance, and on policy its gradient is zero in expectation."""
    return logprobs - reference


def k2(logprobs: Float[Tensor, "tokens"], reference: Float[Tensor, "tokens"]) -> Float[Tensor, "tokens"]:
    """(lp − ref)²/2: biased in value; on policy its gradient is the KL's."""
    return (logprobs - reference).square() / 2


def k3(logprobs: Float[Tensor, "tokens"], reference: Float[Tensor, "tokens"]) -> Float[Tensor, "tokens"]:
    """exp(ref − lp) − (ref − lp) − 1: unbiased in value and never negative; its gradient is not the KL's.

    k1 to k3: J. Schulman, "Approximating KL Divergence", 2020.
    """
    log_ratio = reference - logprobs
    return log_ratio.expm1() - log_ratio


def wide_k3(logprobs: Float[Tensor, "tokens"], reference: Float[Tensor, "tokens"]) -> Float[Tensor, "tokens"]:
    """In float64 where it overflows its own type, and without gradient."""
    own = k3(logprobs.detach(), reference.detach())
    return own.double().where(own.isfinite(), k3(logprobs.detach().double(), reference.detach().double()))


def importance_sampling_corrected(
    logprobs: Float[Tensor, "tokens"],
    old_logprobs: Float[Tensor, "tokens"],
    reference: Float[Tensor, "tokens"],
    clip_ratio: float = math.inf,
) -> Scaled:
    """exp(lp − old) · k3: unbiased in value and gradient for samples of the old policy, while the ratio is not clipped.

    Gradient flows through the ratio as well; that is what makes it the KL's. DeepSeek-V3.2 report, arXiv 2512.02556,
    section 3.1, "Unbiased KL Estimate".
    """
    # Bounded before exp, so that an overflow cannot turn the zero gradient of a clipped ratio into NaN.
    bound = math.log(clip_ratio)
    log_weight = (logprobs - old_logprobs).clamp(max=bound)
    # The current policy cancels out of ratio · exp(ref − lp) while the ratio is not clipped.
    log_product = (reference - logprobs + bound).where(logprobs - old_logprobs > bound, reference - old_logprobs)
    return _times_k3(log_weight, reference - logprobs, log_product)


def _times_k3(
    log_weight: Float[Tensor, "tokens"], log_ratio: Float[Tensor, "tokens"], log_product: Float[Tensor, "tokens"]
) -> Scaled:
    """exp(log_weight) · (exp(log_ratio) − log_ratio − 1), `log_product` being the sum of the two."""
    # Either factor may overflow, or the product of two that do not.
    own = log_weight.detach().exp() * (log_ratio.detach().expm1() - log_ratio.detach())
    far = ~own.isfinite()
    near, near_weight = log_ratio.where(~far, 0.0), log_weight.where(~far, 0.0)
    value = near_weight.exp() * (near.expm1() - near)
    log_scale = log_product.maximum(log_weight).detach().clamp(min=0).where(far, 0.0)
    product = (log_product - log_scale).where(far, 0.0).exp()
    return Scaled(value.where(~far, product - (log_weight - log_scale).exp() * (log_ratio + 1)), log_scale)


def kl_estimate(
    logprobs: Float[Tensor, "tokens"],
    old_logprobs: Float[Tensor, "tokens"],
    reference: Float[Tensor, "tokens"],
    penalty: KlPenalty,
) -> Scaled:
    """The penalty's estimator, without its coefficient."""
    match penalty.estimator:
        case "k1":
            return unscaled(k1(logprobs, reference))
        case "k2":
            return unscaled(k2(logprobs, reference))
        case "k3":
            log_ratio = reference - logprobs
            return _times_k3(torch.zeros_like(log_ratio), log_ratio, log_ratio)
        case "importance_sampling_corrected":
            return importance_sampling_corrected(logprobs, old_logprobs, reference, penalty.clip_ratio)
