"""What ranks_worker does for test_sharded_weights, on two ranks.

Publishes versions of a model that no rank holds whole from memory; rank 0 writes what went through to results.json.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from services.common.config import WeightsConfig
from services.common.transport.outages import Outages
from services.trainer.engine.deepspeed_engine import open_engine
from services.trainer.export.tensors import WeightSource, size
from services.trainer.weights.channels import BroadcastChannel
from services.trainer.weights.publish import Publication, Publisher, Release
from services.trainer.weights.transfer import WeightTransfer
from tests.integration.sharded_worker import configuration
from tests.support.rollout.stub import Rollout

BUFFER_BYTES = 5000


class Wire:
    """In the place of NCCL."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def open(self, unique_id: bytes, world_size: int) -> "Wire":
        return self

    def broadcast(self, buffer: torch.Tensor) -> None:
        self.sent.append(buffer.clone())

    def synchronize(self) -> None: ...

    def abort(self) -> None: ...


def unpacked(source: WeightSource, sent: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    pieces = torch.cat(sent).split([size(tensor) for tensor in source.tensors])
    return {
        tensor.name: piece.clone().view(getattr(torch, tensor.dtype)).view(list(tensor.shape))
        for tensor, piece in zip(source.tensors, pieces, strict=True)
    }


def main(directory: Path) -> None:
    config = configuration(directory / "model", "bfloat16")
    engine = open_engine(config)
    source = engine.weight_source()
    if engine.rank != 0:
        publication = Publication(engine, source, None)
        for version in range(4):
            publication.publish(version, durable=False)
        engine.close()
        return
    rollout, wire = Rollout("r0"), Wire()
    announced: list[Any] = []
    feed: Any = SimpleNamespace(announce=announced.append)
    registry: Any = SimpleNamespace(alive=lambda: [rollout.entry])
    transfer = WeightTransfer(
        registry,
        lambda: BroadcastChannel(
            source.tensors,
            BUFFER_BYTES,
            torch.device("cpu"),
            new_unique_id=lambda: b"u" * 128,
            open_communicator=wire.open,
        ),
        source.tensors,
        token=None,
        timeout_seconds=30,
    )
    release = Release(
        Publisher(directory / "weights", feed, 4, Outages(60.0)), WeightsConfig(transfer="nccl"), transfer
    )
    publication = Publication(engine, source, release)
    for version, fails_at in enumerate([None, None, "part", None]):
        wire.sent, rollout.fails_at = [], fails_at
        publication.publish(version, durable=False)
        if version == 0:
            save_file(unpacked(source, wire.sent), directory / "memory.safetensors")
    results = {
        "versions": [weights.version for weights in announced],
        "on disk": [bool(weights.path) for weights in announced],
        "taken over": [begin.weights.version for begin in rollout.begun],
        "last": rollout.version,
        "parts": len(wire.sent),
        "bytes": source.total_bytes,
    }
    exported = load_file(Path(announced[2].path) / "model.safetensors")
    results["exported bytes"] = sum(tensor.nbytes for tensor in exported.values())
    (directory / "results.json").write_text(json.dumps(results), encoding="utf-8")
    rollout.stop()
    engine.close()
