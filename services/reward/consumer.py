"""The consumer loop: groups in, scored groups or dead letters out."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from trivet.v1 import reward_pb2, sample_pb2

from services.common.errors import InvalidData, TrivetError
from services.common.logs import get_logger
from services.common.transport.outages import Outages
from services.common.transport.streams import Entry, Stream
from services.reward.score import GroupScorer

READ_BLOCK_SECONDS = 0.5
DRAIN_SECONDS = 2.0

P = ParamSpec("P")
T = TypeVar("T")

log = get_logger(__name__)


class RewardWorker:
    """Scores at most `concurrent_groups` at once, and keeps what it holds from being claimed by others."""

    def __init__(
        self,
        samples: Stream[sample_pb2.Group],
        scored: Stream[sample_pb2.ScoredGroup],
        scorer: GroupScorer,
        *,
        concurrent_groups: int,
        heartbeat_seconds: float,
        outages: Outages,
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        self._samples, self._scored, self._scorer = samples, scored, scorer
        self._limit, self._outages = concurrent_groups, outages
        self._heartbeat_seconds, self._drain_seconds = heartbeat_seconds, drain_seconds
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`; then groups in work get `drain_seconds`, and what is left is claimed by another consumer.

        Raises Unavailable once Redis' client has given up, an outage is over its limit, or no scorer process starts.
        """
        stopping = asyncio.create_task(stop.wait())
        heartbeat = asyncio.create_task(self._heartbeat())
        try:
            while not stop.is_set():
                self._raise_failures(heartbeat)
                free = self._limit - len(self._running)
                if free == 0:
                    running = {stopping, heartbeat, *self._running.values()}
                    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    continue
                reading = asyncio.create_task(self._in_thread(self._samples.read, free, READ_BLOCK_SECONDS))
                await asyncio.wait({reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    for entry in reading.result():
                        self._running[entry.id] = asyncio.create_task(self._process(entry))
                else:
                    reading.cancel()
            await self._drain()
            self._raise_failures(heartbeat)
        finally:
            for task in (stopping, heartbeat, *self._running.values()):
                task.cancel()
            await asyncio.gather(stopping, heartbeat, *self._running.values(), return_exceptions=True)

    def _raise_failures(self, heartbeat: asyncio.Task[None]) -> None:
        for entry_id, task in list(self._running.items()):
            if task.done():
                del self._running[entry_id]
                task.result()
        if heartbeat.done():
            heartbeat.result()

    async def _drain(self) -> None:
        if self._running:
            await asyncio.wait(self._running.values(), timeout=self._drain_seconds)

    async def _process(self, entry: Entry[sample_pb2.Group]) -> None:
        group_id = entry.message.prompt.group_id
        try:
            outcome = await self._scorer.score(entry.message)
        except InvalidData as error:
            await self._give_up(entry, error)
            return
        if isinstance(outcome, reward_pb2.ScoreFailure):
            reason = f"{outcome.scorer} on sample {outcome.sample_id}: {outcome.reason}"
            await self._give_up(entry, TrivetError(outcome.code, reason))
            return
        await self._in_thread(self._samples.forward, entry.id, self._scored, outcome)
        log.debug("group_scored", group=group_id, samples=len(outcome.scores))

    async def _give_up(self, entry: Entry[sample_pb2.Group], error: TrivetError) -> None:
        log.warning("group_dead_lettered", group=entry.message.prompt.group_id, code=error.code, reason=str(error))
        await self._in_thread(self._samples.dead_letter, entry, error)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            held = [entry_id for entry_id, task in self._running.items() if not task.done()]
            await self._in_thread(self._samples.touch, held)

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Over an outage, too. The current groups are touched meanwhile, so that nobody claims them."""
        return await self._outages.ride_out(lambda: asyncio.to_thread(work, *args, **options))
