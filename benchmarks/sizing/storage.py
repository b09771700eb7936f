"""Files on paper: checkpoints, recorded steps, published weights, and the seconds a new version takes to arrive."""

import math
from dataclasses import dataclass

from benchmarks.sizing.architecture import Architecture
from benchmarks.sizing.assumptions import Assumptions

# fp32 masters and two moments, in DeepSpeed's optim_states.
OPTIMIZER_BYTES = 12
WEIGHT_BYTES = 2


def checkpoint_bytes(model: Architecture, zero_stage: int) -> float:
    """In bf16: the optimizer's state and the policy to load elsewhere; ZeRO-1 and 2 keep the weights once more."""
    again = 0 if zero_stage == 3 else WEIGHT_BYTES
    return float(model.parameters) * (OPTIMIZER_BYTES + WEIGHT_BYTES + again)


def recorded_step_bytes(model: Architecture, zero_stage: int, order: float) -> float:
    """A checkpoint of what was before, and the step's order; compressed bytes hardly shrink again."""
    return checkpoint_bytes(model, zero_stage) + order


@dataclass(frozen=True)
class WeightSync:
    """Seconds that the trainer and a rollout stand still for a new version."""

    trainer: float
    rollout: float


def by_disk(model: Architecture, rollout_gpus: int, assumptions: Assumptions) -> WeightSync:
    """Rank 0 gathers (network, then GPU to host), writes, and reads again for the checksum, one after the other.

    Each rollout reads twice, to verify and to load. A node's page cache is assumed to hold the version, so that the
    nodes share `disk_read` once and the rest is memory's speed.
    """
    size = WEIGHT_BYTES * float(model.parameters)
    nodes = math.ceil(rollout_gpus / assumptions.gpus_per_node)
    return WeightSync(
        trainer=size * (1 / assumptions.interconnect + 1 / assumptions.host_copy + 1 / assumptions.disk_write)
        + size / assumptions.page_cache,
        rollout=nodes * size / assumptions.disk_read + size / assumptions.page_cache,
    )


def by_nccl(model: Architecture, assumptions: Assumptions) -> WeightSync:
    """The weights cross the network once, as a broadcast from the trainer to all rollouts, which wait for it."""
    size = WEIGHT_BYTES * float(model.parameters)
    return WeightSync(size / assumptions.interconnect, size / assumptions.interconnect)
