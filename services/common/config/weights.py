from typing import Literal

from pydantic import Field

from services.common.config.base import Section


class WeightsConfig(Section):
    """How a new policy version gets from the trainer to the rollouts."""

    transfer: Literal["disk", "nccl", "ipc"] = Field(
        "disk",
        description="disk: files in the run's directory; nccl: from GPU to GPU, also between machines; "
        "ipc: within one GPU that trainer and rollouts share",
    )
    disk_every: int = Field(
        10,
        ge=1,
        le=32,
        description="with nccl or ipc: one version of this many goes to disk too, in addition to the first, the last, "
        "those of checkpoints, and any that a rollout missed",
    )
    timeout_seconds: float = Field(
        300.0,
        gt=0,
        le=540,
        description="for rollouts to join a group, and for all of them to take over one version; other trainer ranks "
        "wait for no more than ten minutes",
    )
    buffer_mib: int = Field(
        256, ge=1, le=4096, description="MiB of GPU memory through which tensors pass, on either side"
    )
