"""What each of the three services needs for itself."""

from typing import Any, Literal

from pydantic import Field, model_validator

from services.common.config.base import Section
from services.common.config.run import ServerConfig

# What the trainer computes with holds no more.
LARGEST_REWARD = 3.4e38


class RolloutConfig(Section):
    """The service that samples, with vLLM."""

    server: ServerConfig = ServerConfig()
    replicas: int = Field(1, ge=1, description="processes that `trivet up` starts")
    concurrent_groups: int = Field(32, ge=1, description="groups that one rollout samples at a time")
    capture: Literal["auto", "native", "worker_extension"] = Field(
        "auto",
        description="what captures routing and candidates: vLLM itself (GPU), or Trivet's worker extension (CPU)",
    )
    update: Literal["keep", "wait"] = Field(
        "keep",
        description="weights arrive while samples run: continue them under the new weights, or finish them first",
    )
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs", "processed_logits", "raw_logits"] = Field(
        "processed_logprobs", description="what vLLM reports of each token; Trivet makes log-probs as sampled of it"
    )
    load_timeout_seconds: float = Field(
        600.0, gt=0, description="for running samples to pause or end, and for a new version to load after that"
    )
    generate_timeout_seconds: float = Field(
        1800.0, gt=0, description="for the samples of one prompt, the wait for a stopped engine included"
    )
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description="further vLLM engine arguments, of those that change speed and memory alone",
        examples=[{"gpu_memory_utilization": 0.5, "tensor_parallel_size": 2}],
    )


class ScorerConfig(Section):
    """One term of the reward."""

    name: str = Field(
        description="exact_match, numeric, regex, math_verify, reasoning_gym, or module:function",
        examples=["exact_match"],
    )
    weight: float = Field(1.0, description="factor of its score in the reward")
    options: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the scorer", examples=[{"answer_field": "solution"}]
    )


class RewardConfig(Section):
    """The service that scores samples (docs/rewards.md)."""

    server: ServerConfig = ServerConfig()
    replicas: int = Field(1, ge=1, description="processes that `trivet up` starts")
    scorers: list[ScorerConfig] = Field(default_factory=list, description="the reward is the weighted sum")
    minimum: float = Field(
        0.0, ge=-LARGEST_REWARD, description="a reward outside [minimum, maximum] is a failure of the scorer"
    )
    maximum: float = Field(1.0, le=LARGEST_REWARD, description="the highest reward, greater than minimum")
    normalize: bool = Field(False, description="map [minimum, maximum] to [0, 1]")
    workers: int = Field(1, ge=1, description="scorer processes of one reward service")
    timeout_seconds: float = Field(10.0, gt=0, description="for one sample by one scorer")
    retries: int = Field(
        2,
        ge=0,
        description="further tries of a failed scorer before the dead letter; one at most after a timeout or a crash, "
        "and a deterministic scorer is tried again after a crash only",
    )
    scorer_memory_mib: int | None = Field(
        2_048, ge=256, description="that one scorer process may write to; more is a MemoryError there. null: no limit"
    )
    scorer_environment: list[str] = Field(
        default_factory=list,
        description="variables that scorers see in addition to PATH, HOME, LANG, PYTHON*, OMP_* and the like",
        examples=[["JUDGE_API_KEY"]],
    )
    scorer_user: str | None = Field(
        None,
        description="user of the scorers where the service is root; without it nobody, if that user can read Python",
    )
    cache_size: int = Field(10_000, ge=0, description="scores of deterministic scorers kept for equal samples; 0: none")
    concurrent_groups: int = Field(64, ge=1, description="groups that one reward service scores at a time")

    @model_validator(mode="after")
    def _range(self) -> "RewardConfig":
        if self.minimum >= self.maximum:
            raise ValueError(f"minimum is {self.minimum}, expected less than maximum ({self.maximum})")
        return self


class OptimizerConfig(Section):
    """AdamW and the schedule of its learning rate."""

    learning_rate: float = Field(1e-6, ge=0, description="its peak, reached at the end of the warm-up")
    betas: tuple[float, float] = Field((0.9, 0.95), description="decay of the first and of the second moment")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(0.0, ge=0, description="decoupled, of matrices; vectors have none")
    warmup_steps: int = Field(5, ge=0, description="optimizer steps of linear warm-up; 0 starts at the peak")
    decay: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="how the learning rate gets from its peak to final_ratio of it; constant: it stays"
    )
    final_ratio: float = Field(0.1, ge=0, le=1, description="learning rate at the last step over its peak")
    max_grad_norm: float = Field(1.0, gt=0, description="a longer gradient is scaled down to this norm")


class ReferenceConfig(Section):
    """The frozen policy that the KL term and DPO compare with. Without either, none is loaded."""

    path: str | None = Field(None, description="the checkpoint; without it, model.path")
    dtype: Literal["float32", "bfloat16", "int8"] | None = Field(
        None, description="of its weights; int8 has a scale for each output; without it, model.dtype"
    )
    device: Literal["trainer", "cpu"] = Field(
        "trainer", description="where it lies: with the policy, or in the CPU's memory"
    )


class RecordingConfig(Section):
    """Steps written down so that they can be run again (`trivet rerun`, `trivet compare`)."""

    every: int = Field(0, ge=0, description="record one step out of this many, the first included; 0 records none")
    keep: int = Field(
        10, ge=1, description="recorded steps to keep, the newest; each takes as much disk as a checkpoint"
    )


class CollapseConfig(Section):
    """When a run that has lost what it had learned ends, naming its best checkpoint (exit status 4)."""

    evaluation_share: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="a held-out accuracy below this share of the best one, and by more than chance, has fallen; "
        "0 for never",
    )
    evaluations: int = Field(3, ge=1, description="fallen evaluations in a row that end the run")
    reward_share: float = Field(
        0.25,
        ge=0,
        lt=1,
        description="a mean reward below this share of the best one, from the lowest reward on, has the held-out "
        "prompts evaluated at once; if they have fallen too, the run ends; 0 for never",
    )
    reward_steps: int = Field(20, ge=1, description="steps that a mean reward is taken over")


class TrainerConfig(Section):
    """The service that trains, with DeepSpeed, and issues prompts."""

    server: ServerConfig = ServerConfig()
    processes: int = Field(1, ge=1, description="ranks that `trivet up` starts with torchrun")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where there is one")
    steps: int = Field(100, ge=1, description="training steps after which the run is finished")
    groups_per_step: int = Field(
        32, ge=1, description="groups (dpo: pairs) in the batch of a step; a multiple of minibatches"
    )
    max_staleness: int = Field(
        1, ge=0, description="versions that sampling may run ahead of training; 0 is synchronous"
    )
    minibatches: int = Field(
        1, ge=1, description="optimizer steps per batch of samples; of fewer preference pairs, one for each pair"
    )
    epochs: int = Field(1, ge=1, description="passes over each batch")
    tokens_per_microbatch: int = Field(4096, ge=2, description="prompt and completion tokens in one packed bin")
    zero_stage: Literal[1, 2, 3] = Field(
        1, description="what DeepSpeed shards over ranks: optimizer state (1), gradients too (2), parameters too (3)"
    )
    gradient_checkpointing: bool = Field(
        False, description="compute activations again in the backward pass, for less memory and more time"
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    recording: RecordingConfig = RecordingConfig()
    checkpoint_every: int = Field(20, ge=1, description="steps between checkpoints; the last step has one as well")
    keep_checkpoints: int = Field(
        3, ge=1, description="checkpoints to keep, the newest; in addition the one with the best held-out score"
    )
    collapse: CollapseConfig = CollapseConfig()
    keep_weights: int = Field(4, ge=2, description="published versions left on disk")
    batch_timeout_seconds: float = Field(
        1800.0, gt=0, description="no scored group for so long, or as long an outage, ends the run"
    )
    stop_timeout_seconds: float = Field(
        600.0, gt=0, description="how long `trivet up` lets a stop end the step and write a checkpoint"
    )
    max_lost_groups: int = Field(
        64, ge=0, description="the run ends after more groups lost in a row than this (dead letters)"
    )
    max_skipped_steps: int = Field(
        10,
        ge=0,
        description="the run ends after more steps in a row than this were skipped because a number was not finite",
    )
    deepspeed: dict[str, Any] = Field(
        default_factory=dict,
        description="further DeepSpeed configuration, of what changes speed and memory alone",
        examples=[{"zero_optimization": {"overlap_comm": True}}],
    )
