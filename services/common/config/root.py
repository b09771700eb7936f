from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from services.common.config.addresses import is_loopback
from services.common.config.algorithm import AlgorithmConfig
from services.common.config.base import Section
from services.common.config.data import DataConfig
from services.common.config.engines import deepspeed_problems, vllm_problems
from services.common.config.run import (
    BlobConfig,
    EvaluationConfig,
    ModelConfig,
    RedisConfig,
    RunConfig,
    SamplingConfig,
)
from services.common.config.services import ReferenceConfig, RewardConfig, RolloutConfig, TrainerConfig
from services.common.config.stability import StabilityConfig
from services.common.config.weights import WeightsConfig


class PrepareConfig(Section):
    """What `trivet up` runs first when `creates` does not exist yet."""

    command: list[str] = Field(
        min_length=1,
        description="program and arguments; python is the one that runs Trivet",
        examples=[["python", "-m", "examples.quickstart", "models/quickstart"]],
    )
    creates: str = Field(
        description="a file; while it exists, the command is not run", examples=["models/quickstart/config.json"]
    )

    @property
    def done(self) -> bool:
        return Path(self.creates).exists()


class Config(Section):
    """The whole YAML. Every service reads the same file."""

    run: RunConfig = Field(examples=[{"name": "my-run"}])
    prepare: PrepareConfig | None = None
    redis: RedisConfig = RedisConfig()
    blobs: BlobConfig = BlobConfig()
    model: ModelConfig = Field(examples=[{"path": "models/quickstart"}])
    data: DataConfig = Field(examples=[{"train": {"kind": "jsonl", "path": "data/train.jsonl"}}])
    sampling: SamplingConfig = SamplingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rl_stability: StabilityConfig = StabilityConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    reference: ReferenceConfig = ReferenceConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()

    @model_validator(mode="after")
    def _combinations(self) -> "Config":
        checks = (_engines, _lengths, _data, _sampling, _schedule, _weights, _servers)
        if problems := [problem for check in checks for problem in check(self)]:
            raise ValueError("; ".join(problems))
        return self

    def dump(self) -> dict[str, Any]:
        return self.model_dump(mode="json")


def _engines(config: Config) -> Iterator[str]:
    yield from vllm_problems(config.rollout.engine)
    yield from deepspeed_problems(config.trainer.deepspeed)


def _lengths(config: Config) -> Iterator[str]:
    longest = config.data.max_prompt_tokens + config.sampling.max_tokens
    if longest > config.model.max_length:
        yield (
            f"model.max_length is {config.model.max_length}, expected at least {longest}: data.max_prompt_tokens "
            f"({config.data.max_prompt_tokens}) + sampling.max_tokens ({config.sampling.max_tokens})"
        )
    if config.trainer.tokens_per_microbatch < config.model.max_length:
        yield (
            f"trainer.tokens_per_microbatch is {config.trainer.tokens_per_microbatch}, expected at least "
            f"model.max_length ({config.model.max_length}), or a long sample would fit in no micro-batch"
        )
    if config.algorithm.name == "dpo" and config.trainer.tokens_per_microbatch < 2 * config.model.max_length:
        yield (
            f"trainer.tokens_per_microbatch is {config.trainer.tokens_per_microbatch}, expected at least twice "
            f"model.max_length ({config.model.max_length}) for dpo: both answers of a pair go into one micro-batch"
        )
    if config.algorithm.overlong_buffer > config.sampling.max_tokens:
        yield (
            f"algorithm.overlong_buffer is {config.algorithm.overlong_buffer}, expected at most sampling.max_tokens "
            f"({config.sampling.max_tokens})"
        )


def _data(config: Config) -> Iterator[str]:
    if config.data.preferences is None and not config.reward.scorers:
        yield "reward.scorers is empty, expected at least one scorer: samples are trained on by their reward"
    if config.sampling.group_size < 2 and config.algorithm.name != "ppo" and config.data.preferences is None:
        yield (
            f"sampling.group_size is {config.sampling.group_size}, expected at least 2: "
            f"{config.algorithm.name} compares the samples of a group"
        )
    if config.algorithm.dynamic_sampling and config.sampling.group_size < 2:
        yield (
            f"algorithm.dynamic_sampling is true, expected false with sampling.group_size "
            f"{config.sampling.group_size}: a group of one never has variance"
        )


def _sampling(config: Config) -> Iterator[str]:
    replayed = config.rl_stability.consistency.keep_sampling_mask
    if config.sampling.truncates and not replayed and config.rl_stability.importance_sampling.mode == "none":
        yield (
            "rl_stability.consistency.keep_sampling_mask is false while sampling truncates (top_k or top_p) and "
            "importance_sampling.mode is none: nothing would correct the ratio; turn one of the two on"
        )
    mode = config.rollout.logprobs_mode
    if config.sampling.truncates and mode.startswith("raw"):
        yield (
            f"rollout.logprobs_mode is {mode}, expected processed_logprobs or processed_logits while sampling "
            "truncates (top_k or top_p): raw values do not tell which tokens were excluded, so no probability follows "
            "from them"
        )
    if config.rollout.capture == "native" and config.sampling.truncates and config.sampling.top_k == 0:
        yield "sampling.top_k is 0, expected more: vLLM's native candidate capture needs top_k when top_p is set"


def _schedule(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if trainer.groups_per_step % trainer.minibatches:
        yield (
            f"trainer.groups_per_step is {trainer.groups_per_step}, expected a multiple of "
            f"trainer.minibatches ({trainer.minibatches})"
        )
    if trainer.keep_weights < trainer.max_staleness + 2:
        yield (
            f"trainer.keep_weights is {trainer.keep_weights}, expected at least trainer.max_staleness + 2 "
            f"({trainer.max_staleness + 2}), or a version could vanish while a rollout loads it"
        )


def _weights(config: Config) -> Iterator[str]:
    transfer, trainer, engine = config.weights.transfer, config.trainer, config.rollout.engine
    if transfer == "disk":
        return
    if config.data.preferences is not None:
        yield f"weights.transfer is {transfer}, expected disk with data.preferences: no rollout takes part"
    if trainer.device == "cpu":
        yield f"weights.transfer is {transfer}, expected disk with trainer.device cpu: it goes from GPU to GPU"
    if engine.get("data_parallel_size", 1) != 1:
        yield (
            f"weights.transfer is {transfer}, expected disk with rollout.engine.data_parallel_size "
            f"{engine['data_parallel_size']}: start as many rollouts instead"
        )
    if transfer == "nccl":
        return
    if trainer.processes > 1:
        yield (
            f"weights.transfer is ipc, expected nccl or disk with trainer.processes {trainer.processes}: "
            "ipc hands over the memory of one GPU, which one trainer process and the rollouts share"
        )
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if engine.get(name, 1) != 1:
            yield (
                f"weights.transfer is ipc, expected nccl or disk with rollout.engine.{name} {engine[name]}: "
                "a rollout's workers would be on other GPUs than the trainer"
            )


def _servers(config: Config) -> Iterator[str]:
    for service in ("rollout", "reward", "trainer"):
        server = getattr(config, service).server
        if not is_loopback(server.host) and server.token is None:
            yield f"{service}.server.token is missing: host {server.host} can be reached from other machines"
