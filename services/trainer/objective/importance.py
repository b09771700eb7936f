"""Weights that cancel the mismatch between the engine that samples and the engine that trains."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from services.trainer.objective.segments import segment_sum

ImportanceMode = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
IMPORTANCE_MODES: tuple[ImportanceMode, ...] = (
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
)


@dataclass(frozen=True)
class Calibration:
    """A factor min(1, initial · e^(−step/decay_steps)) on every corrected weight, that is, on the whole policy term.

    Where `initial` is above 1 it stays at 1 until step decay_steps · ln(initial), and then fades, as the policy term
    does with it: towards the end of a run only KL, value and entropy are left. Steps are optimizer steps.

    Raises ValueError unless both numbers are positive and finite.
    """

    initial: float
    decay_steps: float

    def __post_init__(self) -> None:
        for name, number in (("initial", self.initial), ("decay_steps", self.decay_steps)):
            if not 0 < number < math.inf:
                raise ValueError(f"calibration {name} is {number}, expected more than 0 and finite")

    def factor(self, step: int) -> float:
        return min(1.0, self.initial * math.exp(-step / self.decay_steps))


@dataclass(frozen=True)
class ImportanceCorrection:
    """What happens to a weight outside [clip_min, cap]: truncate moves it to the bound, mask drops it to zero.

    Raises ValueError for an unknown mode, for bounds that are negative or out of order, and for a calibration of mode
    none.
    """

    mode: ImportanceMode = "token_truncate"
    clip_min: float | None = None
    cap: float = 2.0
    calibration: Calibration | None = None

    def __post_init__(self) -> None:
        if self.mode not in IMPORTANCE_MODES:
            raise ValueError(f"mode is {self.mode!r}, expected one of {', '.join(IMPORTANCE_MODES)}")
        if not self.cap > 0:
            raise ValueError(f"cap is {self.cap}, expected more than 0")
        if self.clip_min is not None and not 0 <= self.clip_min < self.cap:
            raise ValueError(f"clip_min is {self.clip_min}, expected 0 or more and less than cap ({self.cap})")
        if self.calibration is not None and self.mode == "none":
            raise ValueError("calibration is set while mode is none, expected a mode whose weights it can calibrate")


def importance_log_ratio(
    old_logprobs: Float[Tensor, "tokens"],
    rollout_logprobs: Float[Tensor, "tokens"],
    sequence_ids: Int[Tensor, "tokens"],
    sequences: int,
    mode: ImportanceMode,
) -> Float[Tensor, "tokens"]:
    """old − rollout of the token or, in the sequence modes, its sequence's sum; unbounded, without gradient."""
    log_ratio = (old_logprobs - rollout_logprobs).detach()
    if mode in ("sequence_truncate", "sequence_mask"):
        log_ratio = segment_sum(log_ratio, sequence_ids, sequences)[sequence_ids]
    return log_ratio


def importance_weights(
    log_ratio: Float[Tensor, "tokens"], correction: ImportanceCorrection
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """The ratio, held in the correction's bounds, 1 for mode none; and its logarithm, also where it underflows.

    Truncated importance sampling: E. L. Ionides, 2008; between a sampling and a training engine: F. Yao et al., "Your
    Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025.
    """
    ratio, low, high = log_ratio.exp(), correction.clip_min or 0.0, correction.cap
    match correction.mode:
        case "none":
            weights = torch.ones_like(ratio)
        case "token_truncate" | "sequence_truncate":
            weights = ratio.clamp(low, high)
        case "token_mask" | "sequence_mask":
            # A ratio that underflows to 0 looks like the weight of a dropped token: only the bounds tell them apart.
            inside = (ratio >= low) & (ratio <= high)
            return ratio.where(inside, 0.0), log_ratio.where(inside, -math.inf)
    return weights, log_ratio.where(weights == ratio, weights.log())
