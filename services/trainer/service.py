import asyncio
from typing import Any

import grpc
from trivet.v1 import trainer_pb2, trainer_pb2_grpc

from services.trainer.checkpoint.directory import Checkpoints
from services.trainer.loop import checkpoint_message
from services.trainer.steps.status import Controls, Status

SAVE_TIMEOUT_SECONDS = 600.0
MAX_WAITING = 256

Context = grpc.aio.ServicerContext[Any, Any]


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Runs on the serving thread; the main thread does the work. Who waits for a checkpoint holds no thread."""

    def __init__(
        self,
        status: Status,
        controls: Controls,
        checkpoints: Checkpoints,
        *,
        save_timeout_seconds: float = SAVE_TIMEOUT_SECONDS,
    ) -> None:
        self._status, self._controls, self._checkpoints = status, controls, checkpoints
        self._save_timeout = save_timeout_seconds
        self._waiting = 0

    async def GetStatus(
        self, request: trainer_pb2.TrainerServiceGetStatusRequest, context: Context
    ) -> trainer_pb2.TrainerServiceGetStatusResponse:
        return self._status.message()

    async def SaveCheckpoint(
        self, request: trainer_pb2.SaveCheckpointRequest, context: Context
    ) -> trainer_pb2.SaveCheckpointResponse:
        if self._waiting >= MAX_WAITING:
            reason = f"{self._waiting} callers wait for a checkpoint already, at most {MAX_WAITING} may"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        self._waiting += 1
        try:
            saving = asyncio.wrap_future(self._controls.request_save())
            checkpoint = await asyncio.wait_for(saving, self._save_timeout)
        except TimeoutError:
            reason = f"no checkpoint within {self._save_timeout:.0f} s; it follows at the end of the running step"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, reason)
        finally:
            self._waiting -= 1
        return trainer_pb2.SaveCheckpointResponse(checkpoint=checkpoint)

    async def ListCheckpoints(
        self, request: trainer_pb2.ListCheckpointsRequest, context: Context
    ) -> trainer_pb2.ListCheckpointsResponse:
        return await asyncio.to_thread(self._list)

    def _list(self) -> trainer_pb2.ListCheckpointsResponse:
        saved = self._checkpoints.list()
        return trainer_pb2.ListCheckpointsResponse(checkpoints=[checkpoint_message(each) for each in saved])

    async def Pause(
        self, request: trainer_pb2.TrainerServicePauseRequest, context: Context
    ) -> trainer_pb2.TrainerServicePauseResponse:
        self._controls.pause()
        return trainer_pb2.TrainerServicePauseResponse()

    async def Resume(
        self, request: trainer_pb2.TrainerServiceResumeRequest, context: Context
    ) -> trainer_pb2.TrainerServiceResumeResponse:
        self._controls.resume()
        return trainer_pb2.TrainerServiceResumeResponse()
