"""gpu_check's weights from the trainer's memory: through the trainer's and the rollout's own code, gRPC included."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from trivet.v1 import rollout_pb2_grpc, weights_pb2

from benchmarks.probe_parts import Place, Skipped, configuration, count_mixed, under_way
from services.common.config import ServerConfig
from services.common.transport.outages import Outages

Transfer = Literal["nccl", "ipc"]
VERSION = weights_pb2.WeightVersion(version=1, fingerprint="from-memory")


def hands_over(place: Place, transfer: Transfer) -> str:
    """A version in flight, then the checksums of what vLLM's kernels read against the same weights from disk."""
    if place.device == "cpu":
        raise Skipped(f"{transfer} goes from GPU to GPU")
    if transfer == "nccl" and torch.cuda.device_count() < 2:
        raise Skipped("NCCL needs a GPU of its own for each process, and here is one")
    from services.rollout.vllm_engine.environment import set_defaults

    set_defaults()
    return asyncio.run(_hand_over(place, transfer))


async def _hand_over(place: Place, transfer: Transfer) -> str:
    from services.common.transport.weight_feed import describe_weights
    from services.rollout.vllm_engine.engine import VllmEngine

    config = configuration(
        place,
        "bfloat16",
        rollout={"engine": {"gpu_memory_utilization": 0.3}},
        weights={"transfer": transfer, "timeout_seconds": 60, "buffer_mib": 1},
    )
    engine = VllmEngine(config, 7)
    await engine.launch()
    server = _server(engine, transfer)
    await server.start()
    try:
        sender, source = _sender(place, config, engine, server.grpc_port)
        llm: Any = engine._llm
        if not await asyncio.to_thread(sender.prepare):
            raise RuntimeError("the rollout did not join the trainer's group")
        samples = await under_way(engine)
        if not await asyncio.to_thread(sender.send, VERSION, iter(source)):
            raise RuntimeError("the rollout did not take the version over")
        spans = count_mixed(await samples)
        from_memory = await llm.compute_weight_checksums()
        await engine.load_weights(describe_weights(place.directory / "other", 2))
        if await llm.compute_weight_checksums() != from_memory:
            raise RuntimeError("the weights from memory are not those that the same version has on disk")
        return f"{source.total_bytes} bytes, two spans in {spans} of 8 samples, checksums as from disk"
    finally:
        await server.stop()
        await engine.close()


def _server(engine: Any, transfer: Transfer) -> Any:
    from services.common.serving.server import ServiceServer
    from services.rollout.groups.sampler import GroupSampler
    from services.rollout.service import GRPC_NAME, RolloutServicer
    from services.rollout.weights.follower import WeightFollower

    nothing: Any = SimpleNamespace(latest=lambda: None, paused=False)
    servicer = RolloutServicer(
        GroupSampler(engine, rollout_id="r", code="c", config="k"),
        WeightFollower(engine, nothing, timeout_seconds=1, directory=Path("weights")),
        nothing,
        limit=1,
        transfer=transfer,
    )
    return ServiceServer(
        ServerConfig(),
        grpc_name=GRPC_NAME,
        register=lambda server: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server),
        ready=lambda: engine.problem,
    )


def _sender(place: Place, config: Any, engine: Any, port: int) -> tuple[Any, Any]:
    """From the last GPU: with one, the rollout's own."""
    from services.rollout.weights.registration import Registration
    from services.trainer.export.tensors import WeightSource
    from services.trainer.model.load import read_model
    from services.trainer.weights.channels import device_uuid, ipc_channel, nccl_channel
    from services.trainer.weights.setup import why_unsuitable
    from services.trainer.weights.transfer import WeightTransfer

    transfer = config.weights.transfer
    device = torch.device("cuda", torch.cuda.device_count() - 1 if transfer == "nccl" else 0)
    torch.cuda.set_device(device)
    source = WeightSource(read_model(str(place.directory / "other"), dtype="bfloat16").to(device), None)
    unreachable: Any = None
    registration = Registration(unreachable, engine, rollout_id="r", address=f"127.0.0.1:{port}", outages=Outages(0.0))
    registry: Any = SimpleNamespace(alive=lambda: [registration.entry()])
    open_channel = nccl_channel if transfer == "nccl" else ipc_channel
    return WeightTransfer(
        registry,
        lambda: open_channel(source.tensors, config.weights.buffer_mib * 2**20, device),
        source.tensors,
        token=None,
        timeout_seconds=config.weights.timeout_seconds,
        unsuitable=lambda each: why_unsuitable(each, transfer, device_uuid(device)),
    ), source
