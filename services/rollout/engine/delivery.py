"""One version in transit from the trainer's call into the engine."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from trivet.v1 import rollout_pb2

from services.common.errors import Unavailable
from services.rollout.engine.tasks import unless


class Delivery:
    """Parts one at a time: the engine asks, and asking again says that the part before is loaded.

    The two ends are tasks of their own, so that a caller that goes away never interrupts the engine.
    """

    def __init__(self, begin: rollout_pb2.TransferBegin) -> None:
        self.begin = begin
        self.received = 0
        self._parts: asyncio.Queue[rollout_pb2.TransferPart | None] = asyncio.Queue()
        self._asked = asyncio.Semaphore(0)
        self._complete = False
        self._abandoned = asyncio.Event()

    async def next(self) -> rollout_pb2.TransferPart | None:
        """The engine's side; None after the last part. Raises Unavailable when the sender gave up."""
        self._asked.release()
        part = await self._parts.get()
        if part is not None:
            self.received += part.count
        elif not self._complete:
            raise self._gave_up()
        return part

    async def during(self, work: Coroutine[Any, Any, Any]) -> None:
        """The engine's side: waits for `work`, which may hang forever when the sender gives up. Raises Unavailable."""
        if not await unless(self._abandoned, work):
            raise self._gave_up()

    async def asked(self) -> None:
        """The sender's side: returns once the engine wants the next part."""
        await self._asked.acquire()

    def hand(self, part: rollout_pb2.TransferPart) -> None:
        self._parts.put_nowait(part)

    def finish(self) -> None:
        self._complete = True
        self._parts.put_nowait(None)

    def abandon(self) -> None:
        """Does nothing to a delivery that is finished."""
        if not self._complete:
            self._abandoned.set()
        self._parts.put_nowait(None)

    def _gave_up(self) -> Unavailable:
        return Unavailable("transfer_abandoned", f"the trainer gave up version {self.begin.weights.version}")
