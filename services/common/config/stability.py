"""The `rl_stability` block: how the sampler/trainer mismatch is cancelled (DeepSeek-V3.2 report, section 3.1)."""

from typing import Literal

from pydantic import Field, model_validator

from services.common.config.base import Section

KlEstimator = Literal["importance_sampling_corrected", "k1", "k2", "k3"]
ImportanceSamplingMode = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


class UnbiasedKl(Section):
    """KL to the frozen reference."""

    enabled: bool = Field(True, description="add the KL term to the loss; off, no reference is loaded for it")
    estimator: KlEstimator = Field(
        "importance_sampling_corrected",
        description="k1, k2, k3, or k3 weighted by the ratio of the policies, whose gradient is unbiased",
    )
    clip_ratio: float = Field(5.0, gt=0, description="upper bound of the ratio that corrects the estimator")
    coef: float = Field(0.001, ge=0, description="weight of the KL term in the loss; 0 is like enabled: false")


class SequenceMasking(Section):
    """Drops the policy term of sequences with a negative advantage that drifted too far."""

    enabled: bool = Field(True, description="mask such sequences; off, all of them count")
    divergence_threshold: float = Field(
        0.1, description="a mean over the sequence of (rollout − current log-prob) above this, in nats, is too far"
    )
    min_keep_ratio: float = Field(0.5, ge=0, le=1, description="the least share of a step's sequences that stay")


class Consistency(Section):
    """What the trainer replays of the sampler's decisions."""

    keep_routing: bool = Field(
        True, description="use the experts that the sampler routed each token to; without effect on a dense model"
    )
    keep_sampling_mask: bool = Field(
        True, description="take log-probs over the candidate set that top_k and top_p left the sampler"
    )


class Calibration(Section):
    """A factor min(1, initial · e^(−step/decay_steps)) on the importance weight, and so on the whole policy term.

    It fades the policy term out: with `initial` above 1, only from step decay_steps · ln(initial) on.
    """

    initial: float = Field(
        gt=0, allow_inf_nan=False, description="the factor at the first step, before it is bounded by 1", examples=[1.0]
    )
    decay_steps: float = Field(
        gt=0, allow_inf_nan=False, description="optimizer steps after which it is e times less", examples=[100]
    )


class ImportanceSampling(Section):
    """Weight exp(old − rollout log-prob) on the policy term."""

    mode: ImportanceSamplingMode = Field(
        "token_truncate",
        description="by token or by sequence: a weight outside [clip_min, cap] moves to the bound (truncate) or to 0 "
        "(mask); none: no weight",
    )
    clip_min: float | None = Field(None, ge=0, description="lower bound of the weight; without it, none")
    cap: float = Field(2.0, gt=0, description="upper bound of the weight")
    calibration: Calibration | None = Field(None, description="without it, no factor: 1 throughout")

    @model_validator(mode="after")
    def _ordered(self) -> "ImportanceSampling":
        if self.clip_min is not None and self.clip_min >= self.cap:
            raise ValueError(f"importance_sampling.clip_min is {self.clip_min}, expected less than cap ({self.cap})")
        if self.calibration is not None and self.mode == "none":
            raise ValueError("importance_sampling.calibration is set while mode is none, expected another mode")
        return self


class StabilityConfig(Section):
    """How the mismatch between sampler and trainer is cancelled (docs/stability.md)."""

    unbiased_kl: UnbiasedKl = UnbiasedKl()
    sequence_masking: SequenceMasking = SequenceMasking()
    consistency: Consistency = Consistency()
    importance_sampling: ImportanceSampling = ImportanceSampling()

    @property
    def needs_reference(self) -> bool:
        return self.unbiased_kl.enabled and self.unbiased_kl.coef > 0
