"""Rollouts that take over weights, by their gRPC service."""

import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from trivet.v1 import rollout_pb2, rollout_pb2_grpc

from services.common.errors import Unavailable

PROBE_SECONDS = 5.0
_REASONS = {grpc.StatusCode.UNAVAILABLE: "unreachable", grpc.StatusCode.DEADLINE_EXCEEDED: "timeout"}

Request = rollout_pb2.UpdateWeightsRequest


class Member:
    """One rollout, as long as its engine is not started again."""

    def __init__(self, entry: rollout_pb2.RegisteredRollout, token: str | None) -> None:
        self.entry = entry
        # The descriptions of a large model's tensors are longer than gRPC's default.
        self._channel = grpc.insecure_channel(entry.address, options=[("grpc.max_send_message_length", -1)])
        self._stub = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        self._metadata: tuple[tuple[str, str | bytes], ...] = (("authorization", f"Bearer {token}"),) if token else ()

    @property
    def name(self) -> str:
        return self.entry.rollout_id

    @property
    def workers(self) -> int:
        return len(self.entry.devices)

    def probe(self) -> None:
        """Raises Unavailable unless the engine is the one that was registered, and runs.

        A meeting with one that cannot come costs the others a restart.
        """
        try:
            status = self._stub.GetStatus(
                rollout_pb2.RolloutServiceGetStatusRequest(), timeout=PROBE_SECONDS, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise failure(self.name, error) from error
        if status.engine != self.entry.engine:
            raise Unavailable("restarting", f"{self.name}: its engine is being started again")

    def join(self, request: rollout_pb2.JoinTransferRequest, seconds: float) -> "Joining":
        return Joining(self.name, self._stub.JoinTransfer.future(request, timeout=seconds, metadata=self._metadata))

    def update(self, seconds: float) -> "MemberUpdate":
        requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        call = self._stub.UpdateWeights(iter(requests.get, None), timeout=seconds, metadata=self._metadata)
        return MemberUpdate(self, call, requests)

    def close(self) -> None:
        self._channel.close()


class Joining:
    def __init__(self, name: str, future: Any) -> None:
        self._name, self._future = name, future

    def then(self, callback: Callable[[], None]) -> None:
        self._future.add_done_callback(lambda _: callback())

    def check(self) -> None:
        """Raises Unavailable if it has failed by now."""
        if self._future.done():
            self.wait()

    def wait(self) -> None:
        try:
            self._future.result()
        except grpc.RpcError as error:
            raise failure(self._name, error) from error
        except grpc.FutureCancelledError as error:
            raise Unavailable("cancelled", f"{self._name}: the call was cancelled") from error

    def cancel(self) -> None:
        self._future.cancel()


class MemberUpdate:
    """One UpdateWeights call."""

    def __init__(self, member: Member, call: Any, requests: "queue.SimpleQueue[Request | None]") -> None:
        self.member, self._call, self._requests = member, call, requests

    def send(self, request: Request) -> None:
        self._requests.put(request)
        if request.HasField("finish"):
            self._requests.put(None)

    def expect(self, stage: rollout_pb2.TransferStage) -> None:
        """Bounded by the call's timeout. Raises Unavailable."""
        try:
            response = next(self._call, None)
            if stage == rollout_pb2.TRANSFER_STAGE_FINISHED:
                # The call's end too, or `end` would cut it off.
                next(self._call, None)
        except grpc.RpcError as error:
            raise failure(self.member.name, error) from error
        if response is None or response.stage != stage:
            said = "nothing" if response is None else rollout_pb2.TransferStage.Name(response.stage)
            expected = rollout_pb2.TransferStage.Name(stage)
            raise Unavailable("refused", f"{self.member.name} answered {said}, expected {expected}")

    def if_it_fails(self, callback: Callable[[], None]) -> None:
        self._call.add_done_callback(lambda call: None if call.code() is grpc.StatusCode.OK else callback())

    def end(self) -> None:
        """Does nothing to a call that is over; else the rollout learns that the version was given up."""
        self._requests.put(None)
        self._call.cancel()


class GroupUpdate:
    """One version to all members. Where one broadcast reaches them all (`collective`), one failure is everybody's."""

    def __init__(self, members: Sequence[Member], seconds: float, *, collective: bool) -> None:
        self._collective = collective
        self._calls = [member.update(seconds) for member in members]
        self.failures: dict[str, Unavailable] = {}
        self.started = time.monotonic()

    @property
    def members(self) -> list[Member]:
        """Those that have not failed."""
        return [call.member for call in self._calls]

    def send(self, request: Callable[[Member], Request]) -> None:
        for call in self._calls:
            call.send(request(call.member))

    def expect(self, stage: rollout_pb2.TransferStage) -> None:
        """Raises Unavailable when nobody is left, and in a collective when one fails."""
        for call in list(self._calls):
            try:
                call.expect(stage)
            except Unavailable as error:
                self.failures[call.member.name] = error
                if self._collective or len(self._calls) == 1:
                    raise
                call.end()
                self._calls.remove(call)

    def if_one_fails(self, callback: Callable[[], None]) -> None:
        for call in self._calls:
            call.if_it_fails(callback)

    def end(self) -> None:
        for call in self._calls:
            call.end()


def failure(name: str, error: Any) -> Unavailable:
    """Of a grpc.RpcError that a call raised."""
    return Unavailable(_REASONS.get(error.code(), "refused"), f"{name}: {error.code().name}: {error.details()}")
