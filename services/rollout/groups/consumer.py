"""Prompts in, samples out: reads the prompt stream, samples groups concurrently, passes each on when it is done."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

import structlog
from trivet.v1 import sample_pb2

from services.common.config import Config
from services.common.errors import InvalidData, Unavailable
from services.common.logs import get_logger
from services.common.transport.blobs import BlobStore
from services.common.transport.outages import Outages
from services.common.transport.streams import Entry, Stream
from services.rollout.engine import metrics
from services.rollout.engine.protocol import EngineFailed, NotServed
from services.rollout.groups.assemble import SampledGroup, store_replays
from services.rollout.groups.sampler import GroupSampler
from services.rollout.weights.follower import WeightFollower

READ_SECONDS = 0.5
MAX_DRAWS = 3

P = ParamSpec("P")
T = TypeVar("T")

Prompts = Stream[sample_pb2.Prompt]
Samples = Stream[sample_pb2.Group]

log = get_logger(__name__)


class PromptWorker:
    """At most `rollout.concurrent_groups` prompts are taken at a time.

    A prompt that can't be sampled goes to the dead letters. One whose samples the engine lost stays in the stream, and
    is claimed again, by whom ever, up to `redis.max_deliveries` times. Whatever else is in the way is waited for, or
    the prompt handed back, and no delivery counts.
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
        outages: Outages,
    ) -> None:
        self._limit = config.rollout.concurrent_groups
        self._touch_seconds = config.redis.claim_idle_seconds / 4
        self._sampler, self._follower = sampler, follower
        self._prompts, self._samples, self._blobs = prompts, samples, blobs
        self._outages = outages
        self._running: dict[str, asyncio.Task[None]] = {}
        self._entries: dict[str, Entry[sample_pb2.Prompt]] = {}
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
        """Works until `drain`. Raises errors that neither the prompt nor the engine explains."""
        heartbeat = asyncio.create_task(self._beat())
        try:
            while not self._stopping:
                self._raise_failures(heartbeat)
                room = self._limit - len(self._running)
                if self.paused or room < 1 or self._sampler.engine.problem or self._follower.problem:
                    await self._wait(READ_SECONDS)
                    continue
                for entry in await self._in_thread(self._prompts.read, room, READ_SECONDS):
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
        """Hands back what is running, and returns how many groups that is."""
        tasks = list(self._running.items())
        for _, task in tasks:
            task.cancel()
        left = [self._entries[entry_id] for entry_id, task in tasks if _innocent(task)]
        await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
        try:
            await asyncio.to_thread(self._prompts.release, left)
        except Unavailable as error:
            log.warning("groups not handed back: others claim them once they are idle", error=str(error))
        return len(tasks)

    def _start(self, entry: Entry[sample_pb2.Prompt]) -> None:
        if entry.id in self._running or self._stopping:
            # Claimed from ourselves while a heartbeat was late: the first task still has it.
            return
        task = asyncio.create_task(self._process(entry), name=entry.id)
        self._running[entry.id], self._entries[entry.id] = task, entry
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            self._running.pop(task.get_name(), None)
            self._entries.pop(task.get_name(), None)
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
            await self._in_thread(self._prompts.touch, list(self._running))

    async def _process(self, entry: Entry[sample_pb2.Prompt]) -> None:
        structlog.contextvars.bind_contextvars(group=entry.message.group_id)
        try:
            sampled = await self._sample(entry)
            group = await self._in_thread(store_replays, sampled, self._blobs)
            await self._in_thread(self._prompts.forward, entry.id, self._samples, group)
        except InvalidData as error:
            metrics.FAILURES.labels(error.code).inc()
            log.warning("prompt refused", code=error.code, error=str(error))
            await self._in_thread(self._prompts.dead_letter, entry, error)
        except EngineFailed as error:
            metrics.FAILURES.labels(error.code).inc()
            log.warning("group lost", code=error.code, error=str(error), deliveries=entry.deliveries)
        except NotServed as error:
            metrics.FAILURES.labels(error.code).inc()
            log.warning("prompt handed back", code=error.code, error=str(error))
            await self._in_thread(self._prompts.release, [entry])

    async def _sample(self, entry: Entry[sample_pb2.Prompt]) -> SampledGroup:
        """Raises NotServed if the engine does not get the weights that the prompt asks for."""
        prompt = entry.message
        for _ in range(MAX_DRAWS):
            await self._outages.ride_out(partial(self._follower.wait_for, prompt.min_version, entry.id))
            sampled = await self._sampler.sample(prompt)
            spans = (span.version for sample in sampled.group.samples for span in sample.versions)
            oldest = min(spans, default=prompt.min_version)
            if self._follower.serves(oldest, prompt.min_version, entry.id):
                return sampled
            # It was started again in between, under older weights.
            log.warning("drawn again", sampled=oldest, wanted=prompt.min_version)
        raise NotServed("weights_behind", f"samples were of version {oldest}, expected {prompt.min_version} or newer")

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Over an outage, too. The current entries are touched meanwhile, so that nobody claims them."""
        return await self._outages.ride_out(lambda: asyncio.to_thread(work, *args, **options))


def _innocent(task: "asyncio.Task[None]") -> bool:
    """Whether the task has not failed, or only for what it had to wait for."""
    return not task.done() or task.cancelled() or isinstance(task.exception(), Unavailable)
