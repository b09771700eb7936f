from typing import Literal

from pydantic import Field

from services.common.config.base import Section


class AlgorithmConfig(Section):
    name: str = Field("grpo", description="a registered algorithm, or module:function")
    advantage_normalization: Literal["none", "std"] = "none"
    clip_low: float | None = Field(None, ge=0, le=1, description="without it, the algorithm's own")
    clip_high: float | None = Field(None, ge=0, description="without it, the algorithm's own")
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] | None = Field(
        None, description="without it, the algorithm's own"
    )
    old_policy: Literal["rollout", "recomputed"] = Field(
        "rollout", description="the ratio's denominator: the sampler's log-probs, or the trainer's own before the step"
    )
