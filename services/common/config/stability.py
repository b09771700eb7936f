"""The `rl_stability` block: how the sampler/trainer mismatch is cancelled (DeepSeek-V3.2 report, section 3.1)."""

from typing import Literal

from pydantic import Field, model_validator

from services.common.config.base import Section

KlEstimator = Literal["importance_sampling_corrected", "k1", "k2", "k3"]
ImportanceSamplingMode = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class UnbiasedKl(Section):
    """KL to the frozen reference."""

    enabled: bool = True
    estimator: KlEstimator = "importance_sampling_corrected"
    clip_ratio: float = Field(5.0, gt=0, description="upper bound of the ratio that corrects the estimator")
    coef: float = Field(0.001, ge=0)


class SequenceMasking(Section):
    """Drops the policy term of sequences with a negative advantage that drifted too far."""

    enabled: bool = True
    divergence_threshold: float = Field(0.1, description="mean over a sequence of (rollout − current log-prob)")
    min_keep_ratio: float = Field(0.5, ge=0, le=1, description="share of a step's sequences that stay at least")


class Consistency(Section):
    """What the trainer replays of the sampler's decisions."""

    keep_routing: bool = True
    keep_sampling_mask: bool = True


class Calibration(Section):
    """A factor min(1, initial · e^(−step/decay_steps)) on the importance weight, and so on the whole policy term.

    It fades the policy term out: with `initial` above 1, only from step decay_steps · ln(initial) on.
    """

    initial: float = Field(gt=0, allow_inf_nan=False)
    decay_steps: float = Field(gt=0, allow_inf_nan=False, description="optimizer steps after which it is e times less")


class ImportanceSampling(Section):
    """Weight exp(old − rollout log-prob) on the policy term."""

    mode: ImportanceSamplingMode = "token_truncate"
    clip_min: float | None = Field(None, ge=0)
    cap: float = Field(2.0, gt=0)
    calibration: Calibration | None = Field(None, description="without it, no factor: 1 throughout")

    @model_validator(mode="after")
    def _ordered(self) -> "ImportanceSampling":
        if self.clip_min is not None and self.clip_min >= self.cap:
            raise ValueError(f"importance_sampling.clip_min is {self.clip_min}, expected less than cap ({self.cap})")
        if self.calibration is not None and self.mode == "none":
            raise ValueError("importance_sampling.calibration is set while mode is none, expected another mode")
        return self


class StabilityConfig(Section):
    unbiased_kl: UnbiasedKl = UnbiasedKl()
    sequence_masking: SequenceMasking = SequenceMasking()
    consistency: Consistency = Consistency()
    importance_sampling: ImportanceSampling = ImportanceSampling()

    @property
    def needs_reference(self) -> bool:
        return self.unbiased_kl.enabled and self.unbiased_kl.coef > 0
