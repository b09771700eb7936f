"""The transfer that the configuration asks for."""

import redis
import torch
from trivet.v1 import rollout_pb2

from services.common.config import Config, ConfigError
from services.common.transport.rollout_registry import RolloutRegistry
from services.trainer.engine.protocol import TrainEngine
from services.trainer.export.tensors import WeightSource
from services.trainer.weights.channels import Channel, device_uuid, ipc_channel, nccl_channel
from services.trainer.weights.transfer import WeightTransfer


def open_source(config: Config, engine: TrainEngine) -> WeightSource | None:
    """On every rank alike. None where versions go to disk alone.

    Raises ConfigError where this trainer's device or ranks cannot take part, InvalidData for a model that cannot.
    """
    transfer = config.weights.transfer
    if transfer == "disk":
        return None
    if engine.device.type != "cuda":
        raise ConfigError(
            f"weights.transfer is {transfer}, expected disk: the trainer runs on the {engine.device.type}"
        )
    if transfer == "ipc" and engine.world_size > 1:
        raise ConfigError(
            f"weights.transfer is ipc, expected nccl or disk with {engine.world_size} trainer ranks: "
            "ipc hands over the memory of one GPU"
        )
    return engine.weight_source()


def open_transfer(
    config: Config, client: redis.Redis, source: WeightSource | None, device: torch.device
) -> WeightTransfer | None:
    if source is None:
        return None
    buffer_bytes = config.weights.buffer_mib * 2**20
    make = nccl_channel if config.weights.transfer == "nccl" else ipc_channel

    def open_channel() -> Channel:
        return make(source.tensors, buffer_bytes, device)

    return WeightTransfer(
        RolloutRegistry(client, config.run.name),
        open_channel,
        source.tensors,
        token=config.rollout.server.token,
        timeout_seconds=config.weights.timeout_seconds,
        unsuitable=lambda entry: why_unsuitable(entry, config.weights.transfer, device_uuid(device)),
    )


def why_unsuitable(entry: rollout_pb2.RegisteredRollout, transfer: str, device: str) -> str | None:
    """Why a rollout's memory cannot be reached from GPU `device`, or None."""
    if not entry.devices or not all(entry.devices):
        return "it runs on a CPU"
    if transfer == "ipc" and set(entry.devices) != {device}:
        return f"it runs on GPU {', '.join(entry.devices)}, the trainer on {device}: ipc stays within one GPU"
    if transfer == "nccl" and device in entry.devices:
        return f"it shares GPU {device} with the trainer: NCCL needs one of its own for each process"
    return None
