from typing import Any

from pydantic import Field, model_validator

from services.common.config.algorithm import AlgorithmConfig
from services.common.config.base import Section
from services.common.config.data import DataConfig
from services.common.config.run import (
    BlobConfig,
    EvaluationConfig,
    ModelConfig,
    RedisConfig,
    RunConfig,
    SamplingConfig,
)
from services.common.config.services import RewardConfig, RolloutConfig, TrainerConfig
from services.common.config.stability import StabilityConfig


class PrepareConfig(Section):
    """What `trivet up` runs first when `creates` does not exist yet."""

    command: list[str] = Field(min_length=1)
    creates: str


class Config(Section):
    """The whole YAML. Every service reads the same file."""

    run: RunConfig
    prepare: PrepareConfig | None = None
    redis: RedisConfig = RedisConfig()
    blobs: BlobConfig = BlobConfig()
    model: ModelConfig
    data: DataConfig
    sampling: SamplingConfig = SamplingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rl_stability: StabilityConfig = StabilityConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig
    trainer: TrainerConfig = TrainerConfig()

    @model_validator(mode="after")
    def _combinations(self) -> "Config":
        for problem in _problems(self):
            raise ValueError(problem)
        return self

    def dump(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


def _problems(config: Config) -> list[str]:
    problems = []
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    if longest > config.model.max_length:
        problems.append(
            f"model.max_length is {config.model.max_length}, expected at least {longest}: data.max_prompt_tokens "
            f"({config.data.max_prompt_tokens}) + sampling.max_tokens ({config.sampling.max_tokens})"
        )
    if config.trainer.tokens_per_microbatch < config.model.max_length:
        problems.append(
            f"trainer.tokens_per_microbatch is {config.trainer.tokens_per_microbatch}, expected at least "
            f"model.max_length ({config.model.max_length}), or a long sample would fit in no micro-batch"
        )
    if config.sampling.group_size < 2 and config.algorithm.name != "ppo":
        problems.append(
            f"sampling.group_size is {config.sampling.group_size}, expected at least 2: "
            f"{config.algorithm.name} compares the samples of a group"
        )
    replayed = config.rl_stability.consistency.keep_sampling_mask
    if config.sampling.truncates and not replayed and config.rl_stability.importance_sampling.mode == "none":
        problems.append(
            "rl_stability.consistency.keep_sampling_mask is false while sampling truncates (top_k or top_p) and "
            "importance_sampling.mode is none: nothing would correct the ratio; turn one of the two on"
        )
    if config.algorithm.dynamic_sampling and config.sampling.group_size < 2:
        problems.append(
            f"algorithm.dynamic_sampling is true, expected false with sampling.group_size "
            f"{config.sampling.group_size}: a group of one never has variance"
        )
    if config.algorithm.overlong_buffer > config.sampling.max_tokens:
        problems.append(
            f"algorithm.overlong_buffer is {config.algorithm.overlong_buffer}, expected at most sampling.max_tokens "
            f"({config.sampling.max_tokens})"
        )
    if config.rollout.capture == "native" and config.sampling.truncates and config.sampling.top_k == 0:
        problems.append(
            "sampling.top_k is 0, expected more: vLLM's native candidate capture needs top_k when top_p is set"
        )
    if config.trainer.groups_per_step % config.trainer.minibatches:
        problems.append(
            f"trainer.groups_per_step is {config.trainer.groups_per_step}, expected a multiple of "
            f"trainer.minibatches ({config.trainer.minibatches})"
        )
    if config.trainer.keep_weights < config.trainer.max_staleness + 2:
        problems.append(
            f"trainer.keep_weights is {config.trainer.keep_weights}, expected at least trainer.max_staleness + 2 "
            f"({config.trainer.max_staleness + 2}), or a version could vanish while a rollout loads it"
        )
    for service in ("rollout", "reward", "trainer"):
        server = getattr(config, service).server
        if server.host not in {"127.0.0.1", "::1", "localhost"} and server.token is None:
            problems.append(f"{service}.server.token is missing: host {server.host} can be reached from other machines")
    return problems
