from typing import Literal

from pydantic import Field, model_validator

from services.common.config.base import Section


class AlgorithmConfig(Section):
    """How rewards or preferences become a loss (docs/algorithms.md has formulas and each algorithm's own defaults)."""

    name: str = Field(
        "grpo", description="a registered algorithm, or module:function", examples=["my_package.algorithms:own"]
    )
    advantage_normalization: Literal["none", "std"] = Field(
        "none", description="std divides a group's advantages by the standard deviation of its rewards"
    )
    clip_low: float | None = Field(
        None, ge=0, le=1, description="the ratio is clipped below at 1 - clip_low; without it, the algorithm's own"
    )
    clip_high: float | None = Field(
        None, ge=0, description="the ratio is clipped above at 1 + clip_high; without it, the algorithm's own"
    )
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] | None = Field(
        None,
        description="how token losses become one: mean of all tokens, mean of the sequences' means, or sum divided by "
        "sequences times max_tokens; without it, the algorithm's own",
    )
    old_policy: Literal["rollout", "recomputed"] = Field(
        "rollout", description="the ratio's denominator: the sampler's log-probs, or the trainer's own before the step"
    )
    overlong_buffer: int = Field(
        0, ge=0, description="tokens before max_tokens over which the reward falls by up to 1 (DAPO); 0 turns it off"
    )
    mask_truncated: bool = Field(False, description="drop the policy term of samples that were cut off at max_tokens")
    dynamic_sampling: bool | None = Field(
        None,
        description="replace groups whose rewards are all the same by fresh ones until the batch is full (DAPO); "
        "without it, the algorithm's own",
    )
    dynamic_sampling_rounds: int = Field(
        3, ge=1, description="batches of groups replaced before a step, at most; the step then trains on what there is"
    )
    gamma: float = Field(1.0, ge=0, le=1, description="discount per token (ppo)")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="bias against variance in the advantages (ppo)")
    value_coef: float | None = Field(
        None, ge=0, description="weight of the value loss; without it, the algorithm's own"
    )
    value_clip: float | None = Field(
        None,
        ge=0,
        description="how far the critic's estimate may move from the one before the step, 0 for no bound; without it, "
        "the algorithm's own",
    )
    entropy_coef: float | None = Field(
        None, ge=0, description="weight of the entropy bonus; without it, the algorithm's own"
    )
    critic: Literal["shared", "separate"] = Field(
        "shared", description="the value head sits on the policy's own trunk, or on a trunk of its own (ppo)"
    )
    critic_path: str | None = Field(None, description="the separate critic's first weights; without it, model.path")
    critic_learning_rate: float | None = Field(
        None, ge=0, description="peak, for the separate critic; without it, trainer.optimizer.learning_rate"
    )
    beta: float | None = Field(
        None,
        gt=0,
        description="weight of the reference in a preference (dpo); without it, the algorithm's own",
    )
    label_smoothing: float | None = Field(
        None, ge=0, lt=0.5, description="share of pairs taken to be labelled wrongly (dpo); without it, none"
    )

    @model_validator(mode="after")
    def _critic(self) -> "AlgorithmConfig":
        for name in ("critic_path", "critic_learning_rate"):
            if self.critic == "shared" and getattr(self, name) is not None:
                raise ValueError(f"{name} is {getattr(self, name)}, expected none while critic is shared")
        return self
