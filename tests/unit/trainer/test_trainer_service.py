"""The trainer's gRPC: who waits for a checkpoint holds up nobody else."""

import asyncio
import time

import grpc
import pytest
from trivet.v1 import trainer_pb2, trainer_pb2_grpc

from services.common.config import ServerConfig
from services.common.serving.server import ServiceServer
from services.trainer import service
from services.trainer.checkpoint.directory import Checkpoints, TrainerState
from services.trainer.service import TrainerServicer
from services.trainer.steps.status import Controls, Status

CALLERS = 60


class WatchedControls(Controls):
    """Says when how many have asked for a checkpoint."""

    def __init__(self):
        super().__init__()
        self.asked = asyncio.Semaphore(0)

    def request_save(self):
        self.asked.release()
        return super().request_save()

    async def until_asked(self, times):
        async with asyncio.timeout(10):
            for _ in range(times):
                await self.asked.acquire()


@pytest.fixture
async def served(request, tmp_path):
    timeout = getattr(request, "param", 60.0)
    controls = WatchedControls()
    controls.status, controls.checkpoints = Status("run", 10), Checkpoints(tmp_path, 3)
    servicer = TrainerServicer(controls.status, controls, controls.checkpoints, save_timeout_seconds=timeout)
    server = ServiceServer(
        ServerConfig(),
        grpc_name="trivet.v1.TrainerService",
        register=lambda target: trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, target),
        ready=lambda: None,
    )
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        yield trainer_pb2_grpc.TrainerServiceStub(channel), controls
    await server.stop()


def save(stub, **options):
    return stub.SaveCheckpoint(trainer_pb2.SaveCheckpointRequest(), **options)


async def test_the_status_is_what_the_main_thread_has_reported(served):
    stub, controls = served
    status, request = controls.status, trainer_pb2.TrainerServiceGetStatusRequest()
    before = await stub.GetStatus(request)
    assert (before.state, before.step, before.steps) == (trainer_pb2.TRAINER_STATE_STARTING, 0, 10)
    assert before.eta_seconds == 0
    status.start_clock(2)
    status.state, status.step, status.metrics = trainer_pb2.TRAINER_STATE_TRAINING, 4, {"loss": 0.5}
    status.evaluation, status.checkpoint_step, status.groups_in_flight = {"greedy_accuracy": 0.75}, 3, 7
    after = await stub.GetStatus(request)
    assert (after.state, after.step, after.version) == (trainer_pb2.TRAINER_STATE_TRAINING, 4, 4)
    assert (dict(after.metrics), dict(after.evaluation)) == ({"loss": 0.5}, {"greedy_accuracy": 0.75})
    assert (after.checkpoint_step, after.groups_in_flight) == (3, 7)
    assert after.eta_seconds > 0


async def test_a_pause_lasts_until_it_is_taken_back(served):
    stub, controls = served
    for _ in range(2):
        await stub.Pause(trainer_pb2.TrainerServicePauseRequest())
        assert controls.paused
    await stub.Resume(trainer_pb2.TrainerServiceResumeRequest())
    assert not controls.paused


async def test_checkpoints_are_listed_oldest_first(served):
    stub, controls = served
    asked = trainer_pb2.ListCheckpointsRequest()
    assert not (await stub.ListCheckpoints(asked)).checkpoints
    for step in (2, 4):
        controls.checkpoints.begin(step)
        controls.checkpoints.commit(
            step,
            TrainerState(
                step=step, history="h", model="m", data="d", config="c", world_size=1, ledger={}, saved_at=float(step)
            ),
        )
    listed = (await stub.ListCheckpoints(asked)).checkpoints
    assert [each.step for each in listed] == [2, 4]


async def test_many_waiting_saves_are_one_save_and_hold_up_nobody(served):
    stub, controls = served
    waiting = [save(stub) for _ in range(CALLERS)]
    await controls.until_asked(CALLERS)
    started = time.monotonic()
    for _ in range(20):
        assert (await stub.GetStatus(trainer_pb2.TrainerServiceGetStatusRequest(), timeout=5)).run == "run"
        await stub.ListCheckpoints(trainer_pb2.ListCheckpointsRequest(), timeout=5)
    assert time.monotonic() - started < 1
    assert not any(call.done() for call in waiting)
    await asyncio.to_thread(controls.answer_saves, trainer_pb2.Checkpoint(step=7))
    answers = await asyncio.wait_for(asyncio.gather(*waiting), 10)
    assert [answer.checkpoint.step for answer in answers] == [7] * CALLERS
    assert not controls.save_requested


async def test_a_caller_that_leaves_takes_the_checkpoint_from_nobody(served):
    stub, controls = served
    leaving, staying = save(stub), save(stub)
    await controls.until_asked(2)
    leaving.cancel()
    # Answered only once the server has seen the one before.
    await stub.GetStatus(trainer_pb2.TrainerServiceGetStatusRequest(), timeout=5)
    controls.answer_saves(trainer_pb2.Checkpoint(step=7))
    assert (await asyncio.wait_for(staying, 10)).checkpoint.step == 7
    # The next one is another checkpoint.
    again = save(stub)
    await controls.until_asked(1)
    controls.answer_saves(trainer_pb2.Checkpoint(step=8))
    assert (await asyncio.wait_for(again, 10)).checkpoint.step == 8


async def test_too_many_waiting_saves_are_refused_until_others_are_answered(served, monkeypatch):
    stub, controls = served
    monkeypatch.setattr(service, "MAX_WAITING", 2)
    waiting = [save(stub) for _ in range(2)]
    await controls.until_asked(2)
    with pytest.raises(grpc.aio.AioRpcError, match="2 callers wait") as refusal:
        await save(stub, timeout=5)
    assert refusal.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    controls.answer_saves(trainer_pb2.Checkpoint(step=7))
    await asyncio.wait_for(asyncio.gather(*waiting), 10)
    again = save(stub)
    await controls.until_asked(1)
    controls.answer_saves(trainer_pb2.Checkpoint(step=8))
    assert (await asyncio.wait_for(again, 10)).checkpoint.step == 8


@pytest.mark.parametrize("served", [0.2], indirect=True)
async def test_a_save_that_does_not_come_ends_the_wait_and_not_the_save(served):
    stub, controls = served
    with pytest.raises(grpc.aio.AioRpcError, match="no checkpoint within") as refusal:
        await save(stub, timeout=5)
    assert refusal.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert controls.save_requested
    controls.answer_saves(trainer_pb2.Checkpoint(step=7))
    assert not controls.save_requested
