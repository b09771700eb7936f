"""The gRPC service of a rollout."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal, NoReturn

import grpc
from trivet.v1 import rollout_pb2, rollout_pb2_grpc

from services.common.errors import InvalidData, Unavailable
from services.common.transport.consumer import Consumer
from services.rollout.engine import metrics
from services.rollout.engine.delivery import Delivery
from services.rollout.engine.protocol import LoadFailed
from services.rollout.groups.sampler import GroupSampler
from services.rollout.vllm_engine.weight_update import check_join
from services.rollout.weights.follower import WeightFollower

GRPC_NAME = "trivet.v1.RolloutService"
MAX_LOADS = 8

Context = grpc.aio.ServicerContext


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    def __init__(
        self,
        sampler: GroupSampler,
        follower: WeightFollower,
        consumer: Consumer[Any, Any],
        *,
        limit: int,
        transfer: Literal["disk", "nccl", "ipc"] = "disk",
    ) -> None:
        """`limit` bounds the groups that callers sample; `transfer` is how weights arrive."""
        self._sampler, self._follower, self._consumer = sampler, follower, consumer
        self._limit, self._transfer = limit, transfer
        self._direct = self._loads = 0

    async def Generate(
        self,
        request: rollout_pb2.GenerateRequest,
        context: "Context[rollout_pb2.GenerateRequest, rollout_pb2.GenerateResponse]",
    ) -> rollout_pb2.GenerateResponse:
        if (problem := self._sampler.engine.problem) is not None:
            await _abort(context, grpc.StatusCode.UNAVAILABLE, problem)
        if self._direct >= self._limit:
            reason = f"{self._direct} groups are being sampled for callers, at most {self._limit} (concurrent_groups)"
            await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        self._direct += 1
        try:
            sampled = await self._sampler.sample(request.prompt)
        except InvalidData as error:
            metrics.FAILURES.labels(error.code).inc()
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"{error.code}: {error}")
        except Unavailable as error:
            metrics.FAILURES.labels(error.code).inc()
            await _abort(context, grpc.StatusCode.UNAVAILABLE, f"{error.code}: {error}")
        finally:
            self._direct -= 1
        return rollout_pb2.GenerateResponse(group=sampled.group, replay=sampled.replays)

    async def LoadWeights(
        self,
        request: rollout_pb2.LoadWeightsRequest,
        context: "Context[rollout_pb2.LoadWeightsRequest, rollout_pb2.LoadWeightsResponse]",
    ) -> rollout_pb2.LoadWeightsResponse:
        if not request.weights.path or not request.weights.files:
            reason = "weights.path and weights.files are needed: without checksums nothing can be verified"
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, reason)
        if self._loads >= MAX_LOADS:
            reason = f"{self._loads} callers load weights, one after the other, at most {MAX_LOADS} may wait"
            await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, reason)
        self._loads += 1
        try:
            seconds = await self._follower.load(request.weights)
        except LoadFailed as error:
            await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, f"{error.code}: {error}")
        finally:
            self._loads -= 1
        return rollout_pb2.LoadWeightsResponse(version=self._sampler.engine.weights.version, seconds=seconds)

    async def JoinTransfer(
        self,
        request: rollout_pb2.JoinTransferRequest,
        context: "Context[rollout_pb2.JoinTransferRequest, rollout_pb2.JoinTransferResponse]",
    ) -> rollout_pb2.JoinTransferResponse:
        backend = request.WhichOneof("backend")
        if backend != self._transfer:
            reason = f"the group is for {backend}, this rollout's weights.transfer is {self._transfer}"
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, reason)
        try:
            check_join(request)
            await self._sampler.engine.join_transfer(request)
        except InvalidData as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"{error.code}: {error}")
        except LoadFailed as error:
            metrics.WEIGHTS_LOAD_FAILURES.labels(error.code).inc()
            await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, f"{error.code}: {error}")
        return rollout_pb2.JoinTransferResponse()

    async def UpdateWeights(
        self,
        request_iterator: AsyncIterator[rollout_pb2.UpdateWeightsRequest],
        context: "Context[rollout_pb2.UpdateWeightsRequest, rollout_pb2.UpdateWeightsResponse]",
    ) -> AsyncIterator[rollout_pb2.UpdateWeightsResponse]:
        requests = aiter(request_iterator)
        first = await anext(requests, None)
        if first is None or not first.HasField("begin") or not first.begin.weights.fingerprint:
            reason = "the first request must be begin, with weights that have a fingerprint"
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, reason)
        delivery = Delivery(first.begin)
        loading = asyncio.create_task(self._follower.receive(delivery))
        # Nobody may be left to ask for its outcome; the follower has logged it by then.
        loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            await _asked(delivery, loading)
            yield rollout_pb2.UpdateWeightsResponse(stage=rollout_pb2.TRANSFER_STAGE_READY)
            async for request in requests:
                if request.HasField("finish"):
                    delivery.finish()
                    seconds = await asyncio.shield(loading)
                    yield rollout_pb2.UpdateWeightsResponse(stage=rollout_pb2.TRANSFER_STAGE_FINISHED, seconds=seconds)
                    return
                delivery.hand(request.part)
                await _asked(delivery, loading)
                yield rollout_pb2.UpdateWeightsResponse(stage=rollout_pb2.TRANSFER_STAGE_LOADED)
        except LoadFailed as error:
            await _abort(context, grpc.StatusCode.FAILED_PRECONDITION, f"{error.code}: {error}")
        finally:
            delivery.abandon()

    async def Pause(
        self, request: rollout_pb2.RolloutServicePauseRequest, context: object
    ) -> rollout_pb2.RolloutServicePauseResponse:
        self._consumer.paused = True
        return rollout_pb2.RolloutServicePauseResponse()

    async def Resume(
        self, request: rollout_pb2.RolloutServiceResumeRequest, context: object
    ) -> rollout_pb2.RolloutServiceResumeResponse:
        self._consumer.paused = False
        return rollout_pb2.RolloutServiceResumeResponse()

    async def GetStatus(
        self, request: rollout_pb2.RolloutServiceGetStatusRequest, context: object
    ) -> rollout_pb2.RolloutServiceGetStatusResponse:
        weights, tally = self._sampler.engine.weights, self._sampler.tally
        return rollout_pb2.RolloutServiceGetStatusResponse(
            rollout_id=self._sampler.rollout_id,
            paused=self._consumer.paused,
            version=weights.version,
            fingerprint=weights.fingerprint,
            running_groups=self._sampler.running,
            groups=tally.groups,
            samples=tally.samples,
            tokens=tally.tokens,
            tokens_per_second=tally.tokens_per_second(),
            load_error=self._follower.load_error,
            engine=self._sampler.engine.identity if self._sampler.engine.problem is None else "",
        )


async def _asked(delivery: Delivery, loading: "asyncio.Task[float]") -> None:
    """Returns when the engine wants more. Raises LoadFailed when it wants none, because the load ended."""
    asked = asyncio.create_task(delivery.asked())
    try:
        await asyncio.wait([asked, loading], return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            loading.result()
    finally:
        asked.cancel()


async def _abort(context: Any, code: grpc.StatusCode, reason: str) -> NoReturn:
    await context.abort(code, reason)
    raise AssertionError("abort returned")
