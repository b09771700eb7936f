"""Keeps the engine on the newest policy version: announced on disk, or handed over from the trainer's memory."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from redis.backoff import ExponentialBackoff
from trivet.v1 import weights_pb2

from services.common.errors import InvalidData, Unavailable
from services.common.logs import get_logger
from services.common.transport.outages import Outages
from services.common.transport.weight_feed import WeightFeed, check_location, same_weights
from services.rollout.engine import metrics
from services.rollout.engine.delivery import Delivery
from services.rollout.engine.protocol import Engine, LoadFailed, NotServed

POLL_SECONDS = 1.0
RETRY_FIRST_SECONDS, RETRY_CAP_SECONDS = 1.0, 60.0
# A version that vLLM could not load cost a restart of the engine.
MAX_REFUSALS = 2
# The trainer can mend these, by writing the version again.
DAMAGED_CODES = {"weights_corrupt", "weights_missing"}

# An announcement and its id.
Announced = tuple[str, weights_pb2.WeightVersion]

log = get_logger(__name__)


class WeightFollower:
    """Compares the engine's weights with the newest announcement, and loads what differs until they are the same."""

    def __init__(self, engine: Engine, feed: WeightFeed, *, timeout_seconds: float, directory: Path) -> None:
        """Nothing is read outside `directory`, the run's published weights, whoever names it."""
        self._engine, self._feed, self._timeout, self._directory = engine, feed, timeout_seconds, directory.absolute()
        self._newest: Announced | None = None
        # Redis had announcements, and has none now.
        self._lost = False
        # The announcement that somebody's own load came after, and the engine that took it.
        self._superseded: tuple[str, str] | None = None
        self._changed = asyncio.Condition()
        self._loading = asyncio.Lock()
        self._backoff = ExponentialBackoff(cap=RETRY_CAP_SECONDS, base=RETRY_FIRST_SECONDS)
        self._failures = self._refusals = 0
        self._next_try = 0.0
        self.load_error = ""
        metrics.WEIGHTS_VERSION.set(engine.weights.version)

    @property
    def problem(self) -> str | None:
        """Why the engine is not on the newest version, or None. Not while a new one is first being loaded."""
        if self._lost:
            return "waiting for weights: Redis has lost the announcements, the trainer makes the newest one again"
        if self._newest is None or self._is_on(self._newest):
            return None
        newest = self._newest[1].version
        if self.load_error:
            return f"waiting for weights: {self.load_error}"
        if not self._newest[1].path:
            return f"waiting for weights: version {newest} went from memory to memory, past this engine"
        return None

    async def catch_up(self) -> None:
        """Loads the newest announcement if there is one. A failed load is reported by `load_error`."""
        await self._look(self._feed.latest)

    async def run(self, outages: Outages) -> None:
        """Follows the announcements until it is cancelled. Raises the error of an outage over the limit."""
        while True:
            after = self._newest[0] if self._newest else None
            await outages.ride_out(lambda: self._look(partial(self._feed.wait, after, POLL_SECONDS)))  # noqa: B023

    async def load(self, weights: weights_pb2.WeightVersion) -> float:
        """Seconds that it took, 0 when the version is there already. Raises LoadFailed."""
        async with self._loading:
            seconds = await self._load(weights)
            await self._supersede()
        return seconds

    async def receive(self, delivery: Delivery) -> float:
        """Seconds that it took. Raises LoadFailed."""
        async with self._loading:
            seconds = await self._timed(delivery.begin.weights, self._receive(delivery))
            await self._supersede()
        return seconds

    async def wait_for(self, version: int, entry_id: str) -> None:
        """Returns once the engine may sample the prompt of the stream's entry, which asks for `version` or newer.

        A trainer announces a version before it asks for it. So where the newest announcement is the younger of the
        two, and of an older version, the trainer has returned to a checkpoint since: then the engine need only be on
        that. Nothing is sampled under a version that the trainer has abandoned, nor while Redis has lost which
        version is the newest. Raises NotServed after the load timeout.
        """
        # What was announced before the prompt was issued is known before it is sampled.
        await self._note(self._feed.latest)
        try:
            async with asyncio.timeout(self._timeout), self._changed:
                await self._changed.wait_for(
                    lambda: not self._lost and self.serves(self._engine.weights.version, version, entry_id)
                )
        except TimeoutError as error:
            raise NotServed(
                "weights_behind",
                f"version {version} was not there within {self._timeout:g} seconds, "
                f"the engine has {self._engine.weights.version} ({self.problem or 'no newer one was announced'})",
            ) from error

    def serves(self, sampled: int, version: int, entry_id: str) -> bool:
        """Whether samples of version `sampled` are what the entry asks for."""
        newest = self._newest
        if newest is not None and sampled > newest[1].version and not self._is_on(newest):
            return False
        if sampled >= version:
            return True
        return newest is not None and _order(newest[0]) > _order(entry_id) and sampled >= newest[1].version

    async def _look(self, read: Callable[[], Announced | None]) -> None:
        await self._note(read)
        due = time.monotonic() >= self._next_try and self._engine.problem is None
        if due and self._newest is not None and not self._is_on(self._newest):
            await self._follow(self._newest)
        # Also the engine changes, by a restart.
        async with self._changed:
            self._changed.notify_all()

    async def _note(self, read: Callable[[], Announced | None]) -> None:
        """Takes note of the newest announcement, which `read` reads. Raises Unavailable."""
        known = self._newest
        found = await asyncio.to_thread(read)
        newer = found is not None and (self._newest is None or _order(found[0]) > _order(self._newest[0]))
        # What was known before, and is not there now, was in a Redis whose ids say nothing about those of this one.
        forgotten = (
            known is not None and known is self._newest and (found is None or _order(found[0]) < _order(known[0]))
        )
        if forgotten:
            log.warning("Redis has lost the announcements", newest=found[1].version if found is not None else None)
            self._superseded = None
        if newer or forgotten:
            self._newest, self._lost = found, found is None
            self._failures = self._refusals = 0
            self._next_try = 0.0

    async def _follow(self, newest: Announced) -> None:
        async with self._loading:
            if self._is_on(newest):
                # A version from memory came while this waited for it.
                return
            target = await self._loadable(newest[1])
            if target is None or self._refusals > MAX_REFUSALS:
                return
            try:
                await self._load(target)
            except LoadFailed as error:
                self._failures += 1
                self._refusals += error.code == "weights_refused"
                seconds = self._backoff.compute(self._failures - 1)
                self._next_try = time.monotonic() + seconds
                log.warning("old weights stay", version=self._engine.weights.version, next_try_seconds=seconds)
                if error.code in DAMAGED_CODES and target is newest[1]:
                    await asyncio.to_thread(self._feed.report_damaged, newest[0])

    async def _loadable(self, newest: weights_pb2.WeightVersion) -> weights_pb2.WeightVersion | None:
        if newest.path:
            return newest
        # It went from memory to memory, past this engine: the next one will reach it.
        found = await asyncio.to_thread(self._feed.latest_on_disk)
        return found[1] if found is not None and found[1].version > self._engine.weights.version else None

    def _is_on(self, newest: Announced) -> bool:
        if same_weights(newest[1], self._engine.weights):
            return True
        announcement, engine = self._superseded or ("", "")
        return engine == self._engine.identity and _order(announcement) >= _order(newest[0])

    async def _supersede(self) -> None:
        """What has been announced so far is older than what the engine has."""
        try:
            found = await asyncio.to_thread(self._feed.latest)
        except Unavailable as error:
            # The weights are there all the same. One that was announced unseen is loaded again, until the next.
            log.warning("announcements not read", code=error.code, error=str(error))
            found = self._newest
        self._superseded = (found[0], self._engine.identity) if found is not None else None
        async with self._changed:
            self._changed.notify_all()

    async def _load(self, weights: weights_pb2.WeightVersion) -> float:
        if same_weights(weights, self._engine.weights):
            return 0.0
        return await self._timed(weights, self._load_files(weights))

    async def _load_files(self, weights: weights_pb2.WeightVersion) -> None:
        await self._check_location(weights)
        await self._engine.load_weights(weights)

    async def _receive(self, delivery: Delivery) -> None:
        # The same version may be on disk, too, where a restarted engine would load it from.
        if delivery.begin.weights.path:
            await self._check_location(delivery.begin.weights)
        await self._engine.receive_weights(delivery)

    async def _check_location(self, weights: weights_pb2.WeightVersion) -> None:
        try:
            await asyncio.to_thread(check_location, weights, self._directory)
        except InvalidData as error:
            raise LoadFailed(error.code, str(error)) from error

    async def _timed(self, weights: weights_pb2.WeightVersion, change: Coroutine[Any, Any, None]) -> float:
        start = time.monotonic()
        try:
            await change
        except LoadFailed as error:
            self.load_error = f"version {weights.version}: {error}"
            metrics.WEIGHTS_LOAD_FAILURES.labels(error.code).inc()
            log.error("weights not loaded", version=weights.version, code=error.code, error=str(error))
            raise
        finally:
            # Also after a failure: a restarted engine may be back on older weights.
            metrics.WEIGHTS_VERSION.set(self._engine.weights.version)
        seconds = time.monotonic() - start
        self.load_error = ""
        metrics.WEIGHTS_LOAD_SECONDS.observe(seconds)
        log.info("weights loaded", version=weights.version, fingerprint=weights.fingerprint, seconds=seconds)
        return seconds


def _order(announcement: str | None) -> tuple[int, int]:
    """A stream id is milliseconds and a number; none is before all."""
    milliseconds, _, number = (announcement or "0-0").partition("-")
    return int(milliseconds), int(number)
