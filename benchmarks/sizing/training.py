"""The trainer on paper: bytes on each GPU, seconds of a step."""

import math
from dataclasses import dataclass
from typing import Literal

from benchmarks.sizing.architecture import Architecture
from benchmarks.sizing.assumptions import Assumptions, Gpu, Workload

ReferenceType = Literal["none", "bfloat16", "int8"]
REFERENCE_BYTES: dict[ReferenceType, int] = {"none": 0, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class TrainerSetup:
    """`reference_on_gpu` False puts it into the hosts' memory (reference.device: cpu)."""

    ranks: int
    zero_stage: Literal[1, 2, 3]
    tokens_per_microbatch: int
    gradient_checkpointing: bool
    reference: ReferenceType
    reference_on_gpu: bool = True


def state_bytes(parameters: int, ranks: int, zero_stage: Literal[1, 2, 3]) -> float:
    """Parameters and gradients in bf16 (2 + 2), fp32 masters and two moments (12); ZeRO shards 12, 14 or 16 of them.

    (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.)
    """
    whole, sharded = {1: (4, 12), 2: (2, 14), 3: (0, 16)}[zero_stage]
    return parameters * (whole + sharded / ranks)


def activation_bytes_per_token(model: Architecture, *, gradient_checkpointing: bool) -> float:
    """In 16 bits. An estimate: attention keeps no scores (a flash kernel), each SwiGLU keeps four of its inner size.

    With checkpointing one input a layer is kept, and one layer at a time is computed again.
    """
    layer = 2.0 * (4 * model.hidden + model.attention.activations + _mlp_activations(model))
    if gradient_checkpointing:
        return 2.0 * model.layers * model.hidden + layer
    return model.layers * layer


def _mlp_activations(model: Architecture) -> int:
    if model.experts is None:
        return 4 * model.dense_size
    used = model.experts.per_token + model.experts.shared
    return used * (2 * model.hidden + 4 * model.experts.size)


@dataclass(frozen=True)
class GpuMemory:
    """Bytes on each GPU of the trainer, and what must fit while the model is read.

    ZeRO-3 shards a model as it is read, and then has one layer at a time whole to probe it. int8 is never sharded.
    """

    state: float
    # The largest layer whole, with its gradient: ZeRO-3 gathers it.
    gathered: float
    reference: float
    activations: float
    start: float

    @property
    def training(self) -> float:
        return self.state + self.gathered + self.reference + self.activations


def gpu_memory(model: Architecture, setup: TrainerSetup) -> GpuMemory:
    sharded = setup.zero_stage == 3
    part = setup.ranks if sharded else 1
    per_token = activation_bytes_per_token(model, gradient_checkpointing=setup.gradient_checkpointing)
    held = REFERENCE_BYTES[setup.reference] if setup.reference_on_gpu else 0
    return GpuMemory(
        state=state_bytes(model.parameters, setup.ranks, setup.zero_stage),
        gathered=4.0 * model.largest_layer if sharded else 0.0,
        reference=held * model.parameters / (part if setup.reference == "bfloat16" else 1),
        activations=per_token * setup.tokens_per_microbatch,
        start=2.0 * model.parameters / part + (2.0 * model.largest_layer if sharded else 0.0),
    )


def forwards(setup: TrainerSetup) -> int:
    """In units of one forward: forward 1, backward 2, measuring 1, and as it is set recomputation 1, reference 1."""
    return 4 + setup.gradient_checkpointing + (setup.reference != "none")


@dataclass(frozen=True)
class StepTime:
    """Seconds; compute and ZeRO's traffic overlap at best, so that the longer of the two counts."""

    compute: float
    traffic: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.traffic)


def step_time(model: Architecture, work: Workload, setup: TrainerSetup, gpu: Gpu, assumptions: Assumptions) -> StepTime:
    """ZeRO-3 gathers the parameters for each forward of the policy (training, measuring) and for backward, scatters
    gradients and gathers a reference that is sharded, 2 bytes a parameter each time and micro-batch. ZeRO-1 and 2
    reduce gradients and gather parameters once.
    """
    flops = work.tokens * forwards(setup) * model.forward_flops(work.length)
    microbatches = math.ceil(work.tokens / (setup.tokens_per_microbatch * setup.ranks))
    reference = setup.reference == "bfloat16" and setup.reference_on_gpu
    passes = (4 + reference) * microbatches if setup.zero_stage == 3 else 2
    link = assumptions.nvlink if setup.ranks <= assumptions.gpus_per_node else assumptions.interconnect
    return StepTime(
        compute=flops / (setup.ranks * gpu.flops * assumptions.training_mfu),
        traffic=passes * 2.0 * model.parameters / link,
    )


def host_memory_at_start(model: Architecture, setup: TrainerSetup, assumptions: Assumptions) -> float:
    """Bytes on one node, of bf16 weights that every rank of it takes in.

    Under ZeRO-3 a parameter at a time: its parts as they are stored, fused, and fused again, at most. Elsewhere, and of
    a reference that is int8 or stays on the CPU, the whole model.
    """
    whole = (
        setup.zero_stage != 3 or setup.reference == "int8" or (setup.reference != "none" and not setup.reference_on_gpu)
    )
    taken = 2.0 * model.parameters if whole else 3 * 2.0 * model.largest_parameter
    return min(setup.ranks, assumptions.gpus_per_node) * taken
