"""The loop of a service that takes entries from one stream and passes on what it makes of them to another."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeVar

import structlog
from google.protobuf.message import Message

from services.common.errors import TrivetError, Unavailable
from services.common.logs import get_logger
from services.common.transport.outages import Outages
from services.common.transport.streams import Entry, Stream, prompt_of

READ_SECONDS = 0.5
RELEASE_SECONDS = 1.0

M = TypeVar("M", bound=Message)
N = TypeVar("N", bound=Message)
P = ParamSpec("P")
T = TypeVar("T")

log = get_logger(__name__)


@dataclass(frozen=True)
class Finished(Generic[N]):
    """The entry leaves its stream, and `message` goes into the next one, at once."""

    message: N


@dataclass(frozen=True)
class Failed:
    """The entry would fail again: it goes to the dead letters."""

    error: TrivetError


@dataclass(frozen=True)
class Lost:
    """The entry may be why: it stays, is claimed once it is idle, and this delivery counts."""

    error: TrivetError


@dataclass(frozen=True)
class GivenBack:
    """The entry is fine: anyone may claim it at once, and this delivery does not count."""

    error: TrivetError


Outcome = Finished[N] | Failed | Lost | GivenBack


class Consumer(Generic[M, N]):
    """Handles at most `concurrency` entries at once, and keeps what it holds from being claimed by others."""

    def __init__(
        self,
        source: Stream[M],
        target: Stream[N],
        handle: Callable[[Entry[M]], Awaitable[Outcome[N]]],
        *,
        concurrency: int,
        outages: Outages,
        grace_seconds: float,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """Nothing is taken while the service is not `ready`."""
        self._source, self._target, self._handle, self._ready = source, target, handle, ready
        self._concurrency, self._outages, self._grace_seconds = concurrency, outages, grace_seconds
        self._touch_seconds = source.config.claim_idle_seconds / 4
        self._held: dict[str, tuple[Entry[M], asyncio.Task[None]]] = {}
        # While it is set no more entries are taken; those that were are finished.
        self.paused = False

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`; what is in hand then gets `grace_seconds`, and the rest is given back.

        Raises what a handler raises, and Unavailable when an outage is over its limit: the entry of a handler that
        failed is not given back.
        """
        stopping, touching = asyncio.create_task(stop.wait()), asyncio.create_task(self._touch())
        reading: asyncio.Task[list[Entry[M]]] | None = None
        unstarted: list[Entry[M]] = []
        try:
            while not stop.is_set():
                room = self._concurrency - len(self._held)
                if reading is None and room > 0 and not self.paused and self._ready():
                    reading = asyncio.create_task(self._in_thread(self._source.read, room, READ_SECONDS))
                waited_for = {stopping, touching, *self._tasks(), *([reading] if reading else [])}
                await asyncio.wait(waited_for, timeout=READ_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                self._collect(touching)
                if reading is not None and reading.done() and not stop.is_set():
                    self._start(reading.result())
                    reading = None
            if reading is not None:
                # Nobody would know of what it still gets.
                await asyncio.wait({reading}, timeout=2 * READ_SECONDS)
                unstarted = reading.result() if reading.done() else []
            if self._held:
                await asyncio.wait(self._tasks(), timeout=self._grace_seconds)
            self._collect(touching)
        finally:
            for task in (stopping, touching, *([reading] if reading else [])):
                task.cancel()
            await self._give_back(unstarted)

    def _tasks(self) -> set[asyncio.Task[None]]:
        return {task for _, task in self._held.values()}

    def _collect(self, touching: asyncio.Task[None]) -> None:
        """Raises what a task has raised."""
        for entry_id, (_, task) in list(self._held.items()):
            if task.done():
                task.result()
                del self._held[entry_id]
        if touching.done():
            touching.result()

    def _start(self, entries: list[Entry[M]]) -> None:
        for entry in entries:
            # What was claimed from ourselves, while a touch was late, is in work.
            if entry.id not in self._held:
                self._held[entry.id] = entry, asyncio.create_task(self._work(entry))

    async def _work(self, entry: Entry[M]) -> None:
        structlog.contextvars.bind_contextvars(group=prompt_of(entry.message).group_id)
        outcome = await self._handle(entry)
        if isinstance(outcome, Finished):
            await self._in_thread(self._source.forward, entry.id, self._target, outcome.message)
            return
        error, how = outcome.error, type(outcome).__name__
        log.warning("not finished", outcome=how, code=error.code, reason=str(error), deliveries=entry.deliveries)
        if isinstance(outcome, Failed):
            await self._in_thread(self._source.dead_letter, entry, error)
        elif isinstance(outcome, GivenBack):
            await self._in_thread(self._source.release, [entry])

    async def _give_back(self, unstarted: list[Entry[M]]) -> None:
        held, self._held = self._held, {}
        for _, task in held.values():
            task.cancel()
        left = [*unstarted, *(entry for entry, task in held.values() if _is_innocent(task))]
        await asyncio.gather(*(task for _, task in held.values()), return_exceptions=True)
        if not left:
            return
        try:
            await asyncio.wait_for(asyncio.to_thread(self._source.release, left), RELEASE_SECONDS)
            log.info("given back", entries=len(left))
        except (Unavailable, TimeoutError) as error:
            log.warning("not given back: others claim them once they are idle", entries=len(left), reason=str(error))

    async def _touch(self) -> None:
        while True:
            await asyncio.sleep(self._touch_seconds)
            await self._in_thread(self._source.touch, list(self._held))

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Over an outage, too. What is held is touched meanwhile, so that nobody claims it."""
        return await self._outages.ride_out(lambda: asyncio.to_thread(work, *args, **options))


def _is_innocent(task: "asyncio.Task[None]") -> bool:
    """Whether the entry did not fail its task, or only what it waited for did."""
    return not task.done() or task.cancelled() or isinstance(task.exception(), Unavailable)
