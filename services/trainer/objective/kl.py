"""Estimators of KL(current ‖ reference) from one sampled token each."""

import math
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

KlEstimator = Literal["importance_sampling_corrected", "k1", "k2", "k3"]
KL_ESTIMATORS: tuple[KlEstimator, ...] = ("importance_sampling_corrected", "k1", "k2", "k3")


@dataclass(frozen=True)
class KlPenalty:
    """coef · estimator; `ratio_clip` bounds from above the ratio in importance_sampling_corrected, and nothing else.

    Raises ValueError for an unknown estimator, a negative coef and a ratio_clip that is not positive.
    """

    estimator: KlEstimator = "importance_sampling_corrected"
    coef: float = 0.001
    ratio_clip: float = 5.0

    def __post_init__(self) -> None:
        if self.estimator not in KL_ESTIMATORS:
            raise ValueError(f"estimator is {self.estimator!r}, expected one of {', '.join(KL_ESTIMATORS)}")
        if not self.coef >= 0:
            raise ValueError(f"coef is {self.coef}, expected 0 or more")
        if not self.ratio_clip > 0:
            raise ValueError(f"ratio_clip is {self.ratio_clip}, expected more than 0")


def k1(logprobs: Float[Tensor, "N"], reference: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """lp − ref: unbiased in value, high variance, and on policy its gradient is zero in expectation."""
    return logprobs - reference


def k2(logprobs: Float[Tensor, "N"], reference: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """(lp − ref)²/2: biased in value; on policy its gradient is the KL's."""
    return (logprobs - reference).square() / 2


def k3(logprobs: Float[Tensor, "N"], reference: Float[Tensor, "N"]) -> Float[Tensor, "N"]:
    """exp(ref − lp) − (ref − lp) − 1: unbiased in value and never negative; its gradient is not the KL's.

    k1 to k3: J. Schulman, "Approximating KL Divergence", 2020.
    """
    log_ratio = reference - logprobs
    return log_ratio.expm1() - log_ratio


def importance_sampling_corrected(
    logprobs: Float[Tensor, "N"],
    old_logprobs: Float[Tensor, "N"],
    reference: Float[Tensor, "N"],
    ratio_clip: float = math.inf,
) -> Float[Tensor, "N"]:
    """exp(lp − old) · k3: unbiased in value and gradient for samples of the old policy, while the ratio is not clipped.

    Gradient flows through the ratio as well; that is what makes it the KL's. DeepSeek-V3.2 report, arXiv 2512.02556,
    section 3.1, "Unbiased KL Estimate".
    """
    # Bounded before exp, so that an overflow cannot turn the zero gradient of a clipped ratio into NaN.
    ratio = (logprobs - old_logprobs).clamp(max=math.log(ratio_clip)).exp()
    return ratio * k3(logprobs, reference)


def kl_estimate(
    logprobs: Float[Tensor, "N"],
    old_logprobs: Float[Tensor, "N"],
    reference: Float[Tensor, "N"],
    penalty: KlPenalty,
) -> Float[Tensor, "N"]:
    """The penalty's estimator, without its coefficient."""
    match penalty.estimator:
        case "k1":
            return k1(logprobs, reference)
        case "k2":
            return k2(logprobs, reference)
        case "k3":
            return k3(logprobs, reference)
        case "importance_sampling_corrected":
            return importance_sampling_corrected(logprobs, old_logprobs, reference, penalty.ratio_clip)
