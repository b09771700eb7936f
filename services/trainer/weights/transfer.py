"""Versions from the trainer's memory to the rollouts that are alive. Rank 0's."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor
from trivet.v1 import rollout_pb2, weights_pb2

from services.common.errors import InvalidData, TrivetError, Unavailable
from services.common.logs import get_logger
from services.common.transport.rollout_registry import RolloutRegistry
from services.trainer.export.tensors import size
from services.trainer.metrics import counters
from services.trainer.weights.channels import Channel
from services.trainer.weights.members import GroupUpdate, Member, Request

# After a second failure in a row the next try is 1, 2, 4, ... versions later.
MAX_PAUSE_VERSIONS = 32
# Versions without a rollout that did not answer, before it is asked again.
SILENT_VERSIONS = 4

log = get_logger(__name__)

Suitable = Callable[[rollout_pb2.RegisteredRollout], str | None]


class WeightTransfer:
    """Keeps a group of the rollouts that are alive. What fails is counted; the caller then publishes to disk."""

    def __init__(
        self,
        registry: RolloutRegistry,
        open_channel: Callable[[], Channel],
        tensors: Sequence[weights_pb2.TensorDescription],
        *,
        token: str | None,
        timeout_seconds: float,
        unsuitable: Suitable = lambda _: None,
    ) -> None:
        """`unsuitable` is why a rollout cannot be reached in memory, or None."""
        self._registry, self._open_channel, self._tensors = registry, open_channel, tensors
        self._token, self._seconds, self._unsuitable = token, timeout_seconds, unsuitable
        self._bytes = sum(map(size, tensors))
        self._group = ""
        self._channel: Channel | None = None
        self._members: list[Member] = []
        self._wanted: set[tuple[str, str]] = set()
        self._reported: set[tuple[str, str]] = set()
        self._failures = self._pause = 0

    @property
    def group(self) -> list[str]:
        """Ids of the rollouts that the next version goes to."""
        return [member.name for member in self._members]

    def prepare(self) -> bool:
        """Forms a new group where others are alive than before. True when every one of them is in it."""
        alive = self._registry.alive()
        able = [entry for entry in alive if self._is_able(entry)]
        if _keys(able) != self._wanted:
            # Others than before: what stood in the way may have ended.
            self._wanted, self._pause = _keys(able), 0
            self._leave()
        if _keys(able) != self._keys():
            self._pause -= 1
            if able and self._pause < 0:
                self._leave()
                self._form(able)
        counters.TRANSFER_MEMBERS.set(len(self._members))
        return bool(self._members) and _keys(alive) == self._keys()

    def send(self, weights: weights_pb2.WeightVersion, tensors: Iterator[tuple[str, Tensor]]) -> bool:
        """True when every member of the group draws new tokens under `weights`. Reads `tensors` to the end."""
        started = time.monotonic()
        update: GroupUpdate | None = None
        try:
            if self._channel is not None and self._members:
                update = GroupUpdate(self._members, self._seconds, collective=self._channel.collective)
                self._send(weights, tensors, self._channel, update)
        except (TrivetError, RuntimeError) as error:
            # RuntimeError: what torch raises for its devices.
            self._failed(error)
        finally:
            # Gathering is collective: the other ranks continue to the end.
            for _ in tensors:
                pass
            if update is not None:
                update.end()
        if update is None or not self._members:
            return False
        for failure in update.failures.values():
            self._count(failure)
        self._members, self._failures = update.members, 0
        counters.TRANSFER_SECONDS.observe(time.monotonic() - started)
        counters.TRANSFER_BYTES.inc(self._bytes)
        return not update.failures

    def close(self) -> None:
        self._leave()

    def _send(
        self,
        weights: weights_pb2.WeightVersion,
        tensors: Iterator[tuple[str, Tensor]],
        channel: Channel,
        update: GroupUpdate,
    ) -> None:
        begin = rollout_pb2.TransferBegin(group=self._group, weights=weights, tensors=self._tensors)
        update.send(lambda _: Request(begin=begin))
        update.expect(rollout_pb2.TRANSFER_STAGE_READY)
        channel.send(tensors, update)
        update.send(lambda _: Request(finish=rollout_pb2.TransferFinish()))
        update.expect(rollout_pb2.TRANSFER_STAGE_FINISHED)

    def _is_able(self, entry: rollout_pb2.RegisteredRollout) -> bool:
        reason = self._unsuitable(entry)
        if reason is not None and not self._reported & _keys([entry]):
            self._reported |= _keys([entry])
            counters.TRANSFER_FAILURES.labels("unsuitable").inc()
            log.warning("rollout gets its weights from disk", rollout=entry.rollout_id, reason=reason)
        return reason is None

    def _keys(self) -> set[tuple[str, str]]:
        return _keys([member.entry for member in self._members])

    def _form(self, entries: Sequence[rollout_pb2.RegisteredRollout]) -> None:
        self._group = uuid.uuid4().hex[:8]
        try:
            self._members = self._answering([Member(entry, self._token) for entry in entries])
            if not self._members:
                raise Unavailable("unreachable", "no rollout answers")
            self._channel = self._open_channel()
            self._channel.join(self._group, self._members, self._seconds)
        except (TrivetError, RuntimeError, OSError) as error:
            self._failed(error)
            return
        self._pause = 0 if len(self._members) == len(entries) else SILENT_VERSIONS
        log.info("transfer group", group=self._group, rollouts=self.group)

    def _failed(self, error: Exception) -> None:
        self._count(error)
        self._leave()
        self._failures += 1
        self._pause = min(MAX_PAUSE_VERSIONS, 2 ** (self._failures - 2)) if self._failures > 1 else 0

    def _answering(self, members: Sequence[Member]) -> list[Member]:
        answering = []
        for member in members:
            try:
                member.probe()
            except Unavailable as error:
                self._count(error)
                member.close()
            else:
                answering.append(member)
        return answering

    def _leave(self) -> None:
        for member in self._members:
            member.close()
        self._members = []
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _count(self, error: Exception) -> None:
        code = "device"
        if isinstance(error, TrivetError):
            code = "invalid" if isinstance(error, InvalidData) else error.code
        counters.TRANSFER_FAILURES.labels(code).inc()
        log.error("weights not handed over", code=code, error=str(error))


def _keys(entries: Sequence[rollout_pb2.RegisteredRollout]) -> set[tuple[str, str]]:
    return {(entry.rollout_id, entry.engine) for entry in entries}
