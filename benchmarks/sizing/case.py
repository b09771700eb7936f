"""One model on one kind of GPU under one configuration."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.sizing.architecture import DENSE_8B, MOE_30B, MOE_671B, Architecture
from benchmarks.sizing.assumptions import H100, H200, Assumptions, Gpu, MeasuredBytes, Workload
from benchmarks.sizing.data_plane import DataPlane, SampleBytes, broadcast_seconds, data_plane, sample_bytes
from benchmarks.sizing.sampling import Replica, RolloutPlan, rollouts_for
from benchmarks.sizing.storage import WeightSync, by_disk, by_nccl
from benchmarks.sizing.training import GpuMemory, ReferenceType, StepTime, TrainerSetup, gpu_memory, step_time
from services.common.config import Config, load_config

EXAMPLES = Path(__file__).parent / "examples"
MEASURED = MeasuredBytes(
    routing_share_128=0.875,
    routing_share_256=1.0,
    prompt_token=7.2,
    completion_token=10.9,
    candidate_base=0.4,
    candidate_id=2.5,
)


@dataclass(frozen=True)
class Case:
    model: Architecture
    gpu: Gpu
    work: Workload
    setup: TrainerSetup
    replica: Replica
    max_blob_bytes: int
    # Checkpoints, published versions, recorded steps.
    kept: tuple[int, int, int]
    assumptions: Assumptions
    measured: MeasuredBytes = MEASURED

    @classmethod
    def of(
        cls,
        model: Architecture,
        gpu: Gpu,
        config: Config,
        assumptions: Assumptions,
        *,
        prompt: int,
        completion: int,
        candidates: float,
    ) -> "Case":
        """Raises ValueError for a configuration in float32: the formulas are those of bf16."""
        if config.model.dtype != "bfloat16":
            raise ValueError(f"model.dtype is {config.model.dtype}, expected bfloat16")
        reference: ReferenceType = "none"
        if config.rl_stability.needs_reference:
            reference = "int8" if config.reference.dtype == "int8" else "bfloat16"
        trainer = config.trainer
        return cls(
            model=model,
            gpu=gpu,
            work=Workload.of(config, prompt=prompt, completion=completion, candidates=candidates),
            setup=TrainerSetup(
                ranks=trainer.processes,
                zero_stage=trainer.zero_stage,
                tokens_per_microbatch=trainer.tokens_per_microbatch,
                gradient_checkpointing=trainer.gradient_checkpointing,
                reference=reference,
                reference_on_gpu=config.reference.device == "trainer",
            ),
            replica=Replica(int(config.rollout.engine.get("tensor_parallel_size", 1))),
            max_blob_bytes=config.blobs.max_bytes,
            kept=(trainer.keep_checkpoints, trainer.keep_weights, trainer.recording.keep),
            assumptions=assumptions,
        )

    @cached_property
    def sample(self) -> SampleBytes:
        return sample_bytes(self.model, self.work, self.measured)

    @cached_property
    def plane(self) -> DataPlane:
        return data_plane(self.model, self.work, self.measured)

    @cached_property
    def memory(self) -> GpuMemory:
        return gpu_memory(self.model, self.setup)

    @cached_property
    def step(self) -> StepTime:
        return step_time(self.model, self.work, self.setup, self.gpu, self.assumptions)

    @cached_property
    def disk(self) -> "Cycle":
        return self._cycle(lambda gpus: by_disk(self.model, gpus, self.assumptions))

    @cached_property
    def nccl(self) -> "Cycle":
        return self._cycle(lambda _: by_nccl(self.model, self.assumptions))

    def _cycle(self, sync: Callable[[int], WeightSync]) -> "Cycle":
        order = broadcast_seconds(self.plane.order, self.assumptions)
        seconds = order + self.step.seconds + sync(0).trainer
        plan = rollouts_for(
            self.model,
            self.work,
            self.replica,
            self.gpu,
            self.assumptions,
            step_seconds=seconds,
            stall=lambda replicas: sync(replicas * self.replica.gpus).rollout,
        )
        return Cycle(seconds, sync(plan.gpus if plan else 0), plan)


@dataclass(frozen=True)
class Cycle:
    """A step from order to published weights, in seconds, and the rollouts that keep up with it, if any do."""

    seconds: float
    sync: WeightSync
    rollouts: RolloutPlan | None


def example_cases(*, prompt: int = 512, completion: int = 7680, candidates: float = 4.0) -> list[Case]:
    chosen = ((DENSE_8B, H100, "8b-dense"), (MOE_30B, H100, "30b-a3b"), (MOE_671B, H200, "671b-moe"))
    return [
        Case.of(
            model,
            gpu,
            load_config(EXAMPLES / f"{name}.yaml", environment={}),
            Assumptions(),
            prompt=prompt,
            completion=completion,
            candidates=candidates,
        )
        for model, gpu, name in chosen
    ]
