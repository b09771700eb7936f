import asyncio
from pathlib import Path

import grpc
import numpy as np
import pytest
from trivet.v1 import rollout_pb2, rollout_pb2_grpc, weights_pb2

from services.common.config import ServerConfig
from services.common.serving.server import ServiceServer
from services.common.wire.replay_data import decode_replay
from services.rollout import service
from services.rollout.engine.protocol import EngineFailed, LoadFailed
from services.rollout.groups.sampler import GroupSampler
from services.rollout.service import GRPC_NAME, RolloutServicer
from services.rollout.weights.follower import WeightFollower
from tests.support.rollout.fakes import FakeEngine, make_prompt

pytestmark = pytest.mark.timeout(60)


class PausableConsumer:
    paused = False


class NoFeed:
    def latest(self):
        return None


WEIGHTS = weights_pb2.WeightVersion(
    version=3, fingerprint="three", path="/w/3", files=[weights_pb2.WeightFile(name="a.safetensors")]
)


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
async def stub(engine):
    sampler = GroupSampler(engine, rollout_id="r1", code="c", config="k")
    follower = WeightFollower(engine, NoFeed(), timeout_seconds=1, directory=Path("/w"))
    servicer = RolloutServicer(sampler, follower, PausableConsumer(), limit=1, transfer="nccl")
    server = ServiceServer(
        ServerConfig(),
        grpc_name=GRPC_NAME,
        register=lambda target: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, target),
        ready=lambda: engine.problem,
    )
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        yield rollout_pb2_grpc.RolloutServiceStub(channel)
    await server.stop()


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return failure.value.code(), failure.value.details()


async def test_generate_returns_the_group_and_its_replay(stub):
    response = await stub.Generate(rollout_pb2.GenerateRequest(prompt=make_prompt()))
    assert len(response.replay) == len(response.group.samples) == 2
    for sample, data in zip(response.group.samples, response.replay, strict=True):
        token_ids = np.asarray(sample.token_ids, np.int32)
        decode_replay(data, sample_id=sample.sample_id, prompt_length=3, token_ids=token_ids)


async def test_generate_names_what_is_wrong(stub, engine):
    code, details = await refusal(stub.Generate(rollout_pb2.GenerateRequest(prompt=make_prompt(token_ids=[]))))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("prompt_empty: token_ids is empty")
    engine.failures = [EngineFailed("engine_dead", "gone")]
    code, details = await refusal(stub.Generate(rollout_pb2.GenerateRequest(prompt=make_prompt())))
    assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "engine_dead: gone")
    engine.problem = "engine is starting"
    code, details = await refusal(stub.Generate(rollout_pb2.GenerateRequest(prompt=make_prompt())))
    assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "engine is starting")


async def test_direct_groups_are_bounded(stub, engine):
    engine.gate.clear()
    first = asyncio.ensure_future(stub.Generate(rollout_pb2.GenerateRequest(prompt=make_prompt())))
    await engine.entered.wait()
    code, _ = await refusal(stub.Generate(rollout_pb2.GenerateRequest(prompt=make_prompt())))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    engine.gate.set()
    assert len((await first).group.samples) == 2


async def test_load_weights(stub, engine):
    response = await stub.LoadWeights(rollout_pb2.LoadWeightsRequest(weights=WEIGHTS))
    assert response.version == 3
    status = await stub.GetStatus(rollout_pb2.RolloutServiceGetStatusRequest())
    assert (status.version, status.fingerprint, status.load_error) == (3, "three", "")


async def test_a_failed_load_keeps_the_old_version_and_says_so(stub, engine):
    engine.load_failures = [LoadFailed("weights_corrupt", "checksum is 1, expected 2")]
    code, details = await refusal(stub.LoadWeights(rollout_pb2.LoadWeightsRequest(weights=WEIGHTS)))
    assert (code, details) == (grpc.StatusCode.FAILED_PRECONDITION, "weights_corrupt: checksum is 1, expected 2")
    status = await stub.GetStatus(rollout_pb2.RolloutServiceGetStatusRequest())
    assert (status.version, status.load_error) == (0, "version 3: checksum is 1, expected 2")


async def test_weights_without_checksums_are_refused(stub, engine):
    bare = weights_pb2.WeightVersion(version=3, path="/w/3")
    code, _ = await refusal(stub.LoadWeights(rollout_pb2.LoadWeightsRequest(weights=bare)))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert engine.loaded == []


@pytest.mark.parametrize("path", ["/etc", "/w", "/w/../etc", "/nowhere", "/w/3/../..", "relative"])
async def test_only_the_runs_own_weights_are_looked_at(stub, engine, path):
    outside = weights_pb2.WeightVersion(version=3, path=path, files=[weights_pb2.WeightFile(name="passwd", size=1)])
    code, details = await refusal(stub.LoadWeights(rollout_pb2.LoadWeightsRequest(weights=outside)))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    # Neither a size, nor a checksum, nor whether it exists.
    assert details == (
        f"weights_outside: weights.path is {path!r}, expected a directory below /w (run.directory, run.name) and names "
        "of files in it"
    )
    assert engine.loaded == []


async def test_an_update_from_memory_does_not_name_files_outside_either(stub, engine):
    outside = weights_pb2.WeightVersion(version=9, fingerprint="nine", path="/etc")
    begin = rollout_pb2.TransferBegin(group="g1", weights=outside, tensors=TENSORS)
    call = stub.UpdateWeights()
    await call.write(rollout_pb2.UpdateWeightsRequest(begin=begin))
    with pytest.raises(grpc.aio.AioRpcError, match="weights_outside"):
        await call.read()
    assert engine.weights.version == 0


async def test_callers_that_load_weights_are_bounded(stub, engine, monkeypatch):
    monkeypatch.setattr(service, "MAX_LOADS", 1)
    entered, gate = asyncio.Event(), asyncio.Event()

    async def slow(weights):
        entered.set()
        await gate.wait()
        engine.weights = weights

    monkeypatch.setattr(engine, "load_weights", slow)
    first = asyncio.ensure_future(stub.LoadWeights(rollout_pb2.LoadWeightsRequest(weights=WEIGHTS)))
    await asyncio.wait_for(entered.wait(), 10)
    code, _ = await refusal(stub.LoadWeights(rollout_pb2.LoadWeightsRequest(weights=WEIGHTS)))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    gate.set()
    assert (await first).version == 3


async def test_pause_resume_and_status(stub):
    await stub.Generate(rollout_pb2.GenerateRequest(prompt=make_prompt()))
    await stub.Pause(rollout_pb2.RolloutServicePauseRequest())
    status = await stub.GetStatus(rollout_pb2.RolloutServiceGetStatusRequest())
    assert status.paused
    assert (status.rollout_id, status.groups, status.samples, status.tokens) == ("r1", 1, 2, 8)
    assert status.tokens_per_second > 0
    await stub.Resume(rollout_pb2.RolloutServiceResumeRequest())
    assert not (await stub.GetStatus(rollout_pb2.RolloutServiceGetStatusRequest())).paused


JOIN = rollout_pb2.JoinTransferRequest(
    group="g1", nccl=rollout_pb2.NcclTransfer(unique_id=b"u" * 128, world_size=2, rank_offset=1, buffer_bytes=2**20)
)
MEMORY = weights_pb2.WeightVersion(version=9, fingerprint="nine")
TENSORS = [weights_pb2.TensorDescription(name=name, dtype="float32", shape=[2]) for name in "ab"]
BEGIN = rollout_pb2.UpdateWeightsRequest(begin=rollout_pb2.TransferBegin(group="g1", weights=MEMORY, tensors=TENSORS))
PART = rollout_pb2.UpdateWeightsRequest(part=rollout_pb2.TransferPart(first=0, count=2))
FINISH = rollout_pb2.UpdateWeightsRequest(finish=rollout_pb2.TransferFinish())
READY, LOADED = rollout_pb2.TRANSFER_STAGE_READY, rollout_pb2.TRANSFER_STAGE_LOADED
FINISHED = rollout_pb2.TRANSFER_STAGE_FINISHED


async def test_a_group_is_joined(stub, engine):
    await stub.JoinTransfer(JOIN)
    assert engine.groups == ["g1"]


async def test_a_group_of_another_kind_is_refused(stub, engine):
    with pytest.raises(grpc.aio.AioRpcError, match=r"for ipc, this rollout's weights\.transfer is nccl") as refusal:
        await stub.JoinTransfer(rollout_pb2.JoinTransferRequest(group="g1", ipc=rollout_pb2.IpcTransfer()))
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert engine.groups == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"unique_id": b"u"}, "unique_id has 1 bytes, expected 128"),
        ({"rank_offset": 0}, "rank_offset is 0, expected 1 to less than nccl.world_size .2"),
        ({"rank_offset": 2}, "rank_offset is 2"),
        ({"buffer_bytes": 2**60}, "buffer_bytes is 1152921504606846976, expected 1 to 4294967296"),
    ],
)
async def test_a_group_that_cannot_come_about_is_refused(stub, engine, change, reason):
    request = rollout_pb2.JoinTransferRequest()
    request.CopyFrom(JOIN)
    for name, value in change.items():
        setattr(request.nccl, name, value)
    with pytest.raises(grpc.aio.AioRpcError, match=reason) as refusal:
        await stub.JoinTransfer(request)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert engine.groups == []


async def test_a_group_that_does_not_come_about_says_why(stub, engine):
    engine.load_failures.append(LoadFailed("transfer_timeout", "not in time"))
    with pytest.raises(grpc.aio.AioRpcError, match="transfer_timeout: not in time") as refusal:
        await stub.JoinTransfer(JOIN)
    assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_each_step_of_an_update_is_answered_before_the_next(stub, engine):
    call = stub.UpdateWeights()
    for request, stage in ((BEGIN, READY), (PART, LOADED), (PART, LOADED)):
        assert engine.weights.version == 0
        await call.write(request)
        assert (await call.read()).stage == stage
    await call.write(FINISH)
    assert (await call.read()).stage == FINISHED
    assert await call.code() is grpc.StatusCode.OK
    assert engine.weights == MEMORY
    assert engine.parts == [(0, 2), (0, 2)]


async def test_an_engine_that_refuses_ends_the_update(stub, engine):
    engine.load_failures.append(LoadFailed("weights_refused", "no"))
    call = stub.UpdateWeights()
    await call.write(BEGIN)
    await call.read()
    await call.write(PART)
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert await call.details() == "weights_refused: no"
    assert (await stub.GetStatus(rollout_pb2.RolloutServiceGetStatusRequest())).load_error == "version 9: no"


@pytest.mark.parametrize(("sent", "identity"), [([BEGIN], "first"), ([BEGIN, PART], "restarted")])
@pytest.mark.parametrize("leave", ["cancel", "done_writing"])
async def test_a_trainer_that_goes_away_is_noticed(stub, engine, sent, identity, leave):
    call = stub.UpdateWeights()
    for request in sent:
        await call.write(request)
        await call.read()
    if leave == "cancel":
        call.cancel()
    else:
        await call.done_writing()
    async with asyncio.timeout(10):
        while (  # noqa: ASYNC110
            "gave up version 9" not in (await stub.GetStatus(rollout_pb2.RolloutServiceGetStatusRequest())).load_error
        ):
            await asyncio.sleep(0.01)
    assert engine.identity == identity
    assert engine.weights.version == 0


@pytest.mark.parametrize("first", [PART, FINISH, rollout_pb2.UpdateWeightsRequest(begin=rollout_pb2.TransferBegin())])
async def test_an_update_begins_with_begin(stub, engine, first):
    call = stub.UpdateWeights(iter([first]))
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert engine.parts == []


async def test_the_status_tells_the_engine_while_it_runs(stub, engine):
    for problem, reported in ((None, "first"), ("engine restarts", "")):
        engine.problem = problem
        assert (await stub.GetStatus(rollout_pb2.RolloutServiceGetStatusRequest())).engine == reported
