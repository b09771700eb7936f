"""Weights from the trainer's memory into the real vLLM, through its own engines for that; only CUDA is stood in for."""

import asyncio

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM
from trivet.v1 import rollout_pb2, rollout_pb2_grpc, weights_pb2

from services.common.transport.outages import Outages
from services.common.transport.rollout_registry import RolloutRegistry
from services.common.transport.weight_feed import describe_weights
from services.rollout.weights.registration import Registration
from services.trainer.export.tensors import WeightSource
from services.trainer.weights.channels import BroadcastChannel, BufferChannel
from services.trainer.weights.transfer import WeightTransfer
from tests.support.rollout import cpu_transfer
from tests.support.rollout.system import serving
from tests.support.rollout.vllm_models import LONG, PROMPT, TOP_K, begun, ids, is_version

pytestmark = pytest.mark.asyncio(loop_scope="session")

BUFFER_BYTES = 100_000
NEW = weights_pb2.WeightVersion(version=1, fingerprint="from-memory")


def channel(transfer, source):
    device = torch.device("cpu")
    if transfer == "nccl":
        return BroadcastChannel(
            source.tensors,
            BUFFER_BYTES,
            device,
            new_unique_id=cpu_transfer.new_unique_id,
            open_communicator=cpu_transfer.Sender,
        )
    buffer = cpu_transfer.Buffer()
    return BufferChannel(
        source.tensors,
        BUFFER_BYTES,
        device,
        export=buffer.export,
        synchronize=buffer.synchronize,
        collect=buffer.collect,
    )


def transfer_of(config_name, source, redis_client, run, **changes):
    return WeightTransfer(
        RolloutRegistry(redis_client, run),
        lambda: channel(config_name, source),
        source.tensors,
        token=None,
        **{"timeout_seconds": 60, **changes},
    )


@pytest.mark.parametrize("transfer", ["nccl", "ipc"])
async def test_a_running_sample_goes_on_under_weights_from_memory(
    paths, transfer, engine, whole_prompt_engine, redis_client
):
    engine = {"nccl": engine, "ipc": whole_prompt_engine}[transfer]
    source = WeightSource(AutoModelForCausalLM.from_pretrained(paths[2]), None)
    async with serving(engine, transfer) as port:
        registry = RolloutRegistry(redis_client, f"memory-{transfer}")
        registry.renew(
            Registration(registry, engine, rollout_id="r1", address=f"127.0.0.1:{port}", outages=Outages(60)).entry()
        )
        sender = transfer_of(transfer, source, redis_client, f"memory-{transfer}")
        before = await engine._llm.compute_weight_checksums()
        assert await asyncio.to_thread(sender.prepare)

        task = asyncio.create_task(engine.generate(PROMPT, LONG, ids(4), capture=True))
        await begun(engine, 4)
        assert await asyncio.to_thread(sender.send, NEW, iter(source))
        assert engine.weights == NEW
        samples = await task
        mixed = [sample for sample in samples if len(sample.spans) == 2]
        assert mixed, "every sample ended before the update"
        for sample in mixed:
            first, second = sample.spans
            assert (first.version, first.start, second.version, second.end) == (0, 0, 1, len(sample.token_ids))
            assert (first.end, second.fingerprint) == (second.start, "from-memory")

        # The same as the same weights from disk, to the last bit of what vLLM's kernels read.
        from_memory = await engine._llm.compute_weight_checksums()
        await engine.load_weights(describe_weights(paths[2], 2))
        assert await engine._llm.compute_weight_checksums() == from_memory != before
        # And once more, over what came from disk.
        assert await asyncio.to_thread(sender.prepare)
        assert await asyncio.to_thread(
            sender.send, weights_pb2.WeightVersion(version=3, fingerprint="again"), iter(source)
        )
        assert await engine._llm.compute_weight_checksums() == from_memory
        assert is_version((await engine.generate(PROMPT, TOP_K, ids(1), capture=True))[0], 3)
        await asyncio.to_thread(sender.close)


async def test_an_engine_left_in_the_middle_comes_back_from_disk_and_joins_anew(paths, engine, redis_client):
    source = WeightSource(AutoModelForCausalLM.from_pretrained(paths[2]), None)
    async with serving(engine, "nccl") as port:
        registry = RolloutRegistry(redis_client, "middle")
        registration = Registration(registry, engine, rollout_id="r1", address=f"127.0.0.1:{port}", outages=Outages(60))
        registry.renew(registration.entry())
        sender = transfer_of("nccl", source, redis_client, "middle")
        assert await asyncio.to_thread(sender.prepare)
        assert await asyncio.to_thread(sender.send, NEW, iter(source))
        before = await engine._llm.compute_weight_checksums()
        first = engine.identity

        # The next version breaks off after the first parts.
        broken = ((name, tensor if index < 40 else tensor.double()) for index, (name, tensor) in enumerate(source))
        version = weights_pb2.WeightVersion(version=2, fingerprint="broken")
        assert not await asyncio.to_thread(sender.send, version, broken)
        async with asyncio.timeout(120):
            while engine.identity == first or engine.problem is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        # What came from memory is lost with it: the newest on disk is the model itself.
        assert engine.weights.version == 0
        assert is_version((await engine.generate(PROMPT, TOP_K, ids(1), capture=True))[0], 0)

        registry.renew(registration.entry())
        assert await asyncio.to_thread(sender.prepare)
        assert await asyncio.to_thread(sender.send, weights_pb2.WeightVersion(version=3, fingerprint="3"), iter(source))
        assert await engine._llm.compute_weight_checksums() == before
        await asyncio.to_thread(sender.close)


async def test_a_meeting_that_is_called_off_does_not_hold_the_engine(engine):
    """The worker waits for rank 0, which does not come: nothing but a new start gets it out of there."""
    async with serving(engine, "nccl") as port:
        first = engine.identity
        nccl = rollout_pb2.NcclTransfer(
            unique_id=cpu_transfer.new_unique_id(), world_size=2, rank_offset=1, buffer_bytes=1
        )
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as called:
            stub = rollout_pb2_grpc.RolloutServiceStub(called)
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await stub.JoinTransfer(rollout_pb2.JoinTransferRequest(group="g", nccl=nccl), timeout=1)
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(60):
            while engine.identity == first or engine.problem is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert is_version((await engine.generate(PROMPT, TOP_K, ids(1), capture=True))[0], 0)
