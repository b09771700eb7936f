import asyncio
from typing import Any

import grpc
from trivet.v1 import trainer_pb2, trainer_pb2_grpc

from services.common.errors import Unavailable
from services.trainer.checkpoint import Checkpoints
from services.trainer.loop import checkpoint_message
from services.trainer.status import Controls, Status

SAVE_TIMEOUT_SECONDS = 600.0

Context = grpc.aio.ServicerContext[Any, Any]


class TrainerServicer(trainer_pb2_grpc.TrainerServiceServicer):
    """Runs on the serving thread; the main thread does the work."""

    def __init__(self, status: Status, controls: Controls, checkpoints: Checkpoints) -> None:
        self._status, self._controls, self._checkpoints = status, controls, checkpoints

    async def GetStatus(
        self, request: trainer_pb2.TrainerServiceGetStatusRequest, context: Context
    ) -> trainer_pb2.TrainerServiceGetStatusResponse:
        return self._status.message()

    async def SaveCheckpoint(
        self, request: trainer_pb2.SaveCheckpointRequest, context: Context
    ) -> trainer_pb2.SaveCheckpointResponse:
        waiting = self._controls.request_save()
        try:
            checkpoint = await asyncio.to_thread(waiting.wait, SAVE_TIMEOUT_SECONDS)
        except Unavailable as error:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        return trainer_pb2.SaveCheckpointResponse(checkpoint=checkpoint)

    async def ListCheckpoints(
        self, request: trainer_pb2.ListCheckpointsRequest, context: Context
    ) -> trainer_pb2.ListCheckpointsResponse:
        saved = await asyncio.to_thread(self._checkpoints.list)
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
