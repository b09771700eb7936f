"""Prompts in, samples out: reads the prompt stream, samples groups side by side, hands each on when it is done."""

import asyncio

import structlog
from trivet.v1 import sample_pb2

from services.common.blobs import BlobStore
from services.common.config import Config
from services.common.errors import InvalidData, TrivetError, Unavailable
from services.common.logs import get_logger
from services.common.streams import Entry, Stream
from services.rollout import metrics
from services.rollout.assemble import store_replays
from services.rollout.follower import WeightFollower
from services.rollout.sampler import GroupSampler

READ_SECONDS = 0.5

Prompts = Stream[sample_pb2.Prompt]
Samples = Stream[sample_pb2.Group]

log = get_logger(__name__)


class PromptWorker:
    """At most `rollout.concurrent_groups` prompts are taken at a time.

    A prompt that can't be sampled goes to the dead letters. One whose samples were lost stays in the stream, and is
    claimed again, by whom ever, up to `redis.max_deliveries` times.
    """

    def __init__(
        self,
        config: Config,
        *,
        sampler: GroupSampler,
        follower: WeightFollower,
        prompts: Prompts,
        samples: Samples,
        blobs: BlobStore,
    ) -> None:
        self._limit = config.rollout.concurrent_groups
        self._touch_seconds = config.redis.claim_idle_seconds / 4
        self._sampler, self._follower = sampler, follower
        self._prompts, self._samples, self._blobs = prompts, samples, blobs
        self._running: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._stopping = False
        self.paused = False

    def pause(self) -> None:
        """Takes no more prompts; those taken are finished."""
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        self._changed.set()

    async def run(self) -> None:
        """Works until `drain`. Raises what neither the prompt nor the engine explains."""
        heartbeat = asyncio.create_task(self._beat())
        try:
            while not self._stopping:
                self._raise_failures(heartbeat)
                room = self._limit - len(self._running)
                if self.paused or room < 1 or self._sampler.engine.problem is not None:
                    await self._wait(READ_SECONDS)
                    continue
                for entry in await asyncio.to_thread(self._prompts.read, room, READ_SECONDS):
                    self._start(entry)
        finally:
            heartbeat.cancel()
            await asyncio.gather(heartbeat, return_exceptions=True)

    async def drain(self, grace_seconds: float) -> None:
        """Takes no more prompts, and finishes what is running if that takes no longer."""
        self._stopping = True
        self._changed.set()
        if self._running:
            await asyncio.wait(list(self._running.values()), timeout=grace_seconds)

    async def abandon(self) -> int:
        """Returns how many groups are left for others to claim."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(tasks)

    def _start(self, entry: Entry[sample_pb2.Prompt]) -> None:
        if entry.id in self._running or self._stopping:
            # Claimed from ourselves while a heartbeat was late: the first task still has it.
            return
        task = asyncio.create_task(self._process(entry), name=entry.id)
        self._running[entry.id] = task
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            self._running.pop(task.get_name(), None)
        self._changed.set()

    def _raise_failures(self, heartbeat: asyncio.Task[None]) -> None:
        for task in [heartbeat, *self._running.values()]:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _wait(self, seconds: float) -> None:
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._touch_seconds)
            await asyncio.to_thread(self._prompts.touch, list(self._running))

    async def _process(self, entry: Entry[sample_pb2.Prompt]) -> None:
        structlog.contextvars.bind_contextvars(group=entry.message.group_id)
        try:
            await self._follower.wait_for(entry.message.min_version)
            sampled = await self._sampler.sample(entry.message)
            group = await asyncio.to_thread(store_replays, sampled, self._blobs)
        except InvalidData as error:
            await self._refuse(entry, error)
            return
        except Unavailable as error:
            metrics.FAILURES.labels(error.code).inc()
            log.warning("group lost", code=error.code, error=str(error), deliveries=entry.deliveries)
            return
        await asyncio.to_thread(self._prompts.forward, entry.id, self._samples, group)

    async def _refuse(self, entry: Entry[sample_pb2.Prompt], error: TrivetError) -> None:
        metrics.FAILURES.labels(error.code).inc()
        log.warning("prompt refused", code=error.code, error=str(error))
        await asyncio.to_thread(self._prompts.dead_letter, entry, error)
