"""Keeps the engine on the newest policy version: announced on disk, or handed over from the trainer's memory."""

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from trivet.v1 import weights_pb2

from services.common.errors import InvalidData, TrivetError
from services.common.logs import get_logger
from services.common.weights import WeightFeed, check_location
from services.rollout import metrics
from services.rollout.delivery import Delivery
from services.rollout.engine import Engine, LoadFailed

POLL_SECONDS = 1.0

log = get_logger(__name__)


class WeightFollower:
    """An announcement is settled once it was loaded, or its load failed, or a newer one was settled."""

    def __init__(self, engine: Engine, feed: WeightFeed, *, timeout_seconds: float, directory: Path) -> None:
        """Nothing is read outside `directory`, the run's published weights, whoever names it."""
        self._engine, self._feed, self._timeout, self._directory = engine, feed, timeout_seconds, directory.absolute()
        self._settled: str | None = None
        self._changed = asyncio.Condition()
        self._loading = asyncio.Lock()
        self.load_error = ""
        metrics.WEIGHTS_VERSION.set(engine.weights.version)

    async def catch_up(self) -> None:
        """Loads the newest announcement if there is one. A failed load is told by `load_error`."""
        found = await asyncio.to_thread(self._feed.latest_on_disk)
        if found is not None:
            await self._settle(*found)

    async def run(self) -> None:
        """Follows the announcements until it is cancelled."""
        while True:
            found = await asyncio.to_thread(self._feed.wait, self._settled, POLL_SECONDS)
            if found is not None:
                await self._settle(*found)

    async def load(self, weights: weights_pb2.WeightVersion) -> float:
        """Seconds that it took, 0 when the version is there already. Raises LoadFailed."""
        async with self._loading:
            return await self._load(weights)

    async def receive(self, delivery: Delivery) -> float:
        """Seconds that it took. Raises LoadFailed."""
        async with self._loading:
            seconds = await self._timed(delivery.begin.weights, self._receive(delivery))
            # What was announced by now is older.
            found = await asyncio.to_thread(self._feed.latest)
        if found is not None:
            await self._mark(found[0])
        return seconds

    async def _load(self, weights: weights_pb2.WeightVersion) -> float:
        if _same(weights, self._engine.weights):
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

    async def wait_for(self, version: int) -> None:
        """Returns once the engine is on `version` or newer, or as new as anybody announced.

        Bounded by the load timeout; then the engine samples with what it has, and the spans say so.
        """
        if self._engine.weights.version >= version:
            return
        found = await asyncio.to_thread(self._feed.latest)
        if found is None:
            return
        try:
            async with asyncio.timeout(self._timeout), self._changed:
                await self._changed.wait_for(
                    lambda: self._settled is not None and _order(self._settled) >= _order(found[0])
                )
        except TimeoutError:
            log.warning("weights did not arrive", wanted=version, have=self._engine.weights.version)

    async def _settle(self, announcement: str, weights: weights_pb2.WeightVersion) -> None:
        async with self._loading:
            try:
                if _order(announcement) > _order(self._settled):
                    await self._follow(weights)
            except TrivetError:
                # Told in `load_error`, the log and the metrics; the next announcement may do better.
                log.info("old weights stay", version=self._engine.weights.version)
        await self._mark(announcement)

    async def _follow(self, weights: weights_pb2.WeightVersion) -> None:
        if weights.path or _same(weights, self._engine.weights):
            await self._load(weights)
            return
        # It went from memory to memory, past this engine: the next one will reach it.
        found = await asyncio.to_thread(self._feed.latest_on_disk)
        if found is not None and found[1].version > self._engine.weights.version:
            await self._load(found[1])

    async def _mark(self, announcement: str) -> None:
        async with self._changed:
            if _order(announcement) > _order(self._settled):
                self._settled = announcement
            self._changed.notify_all()


def _same(one: weights_pb2.WeightVersion, other: weights_pb2.WeightVersion) -> bool:
    return bool(one.fingerprint) and (one.version, one.fingerprint) == (other.version, other.fingerprint)


def _order(announcement: str | None) -> tuple[int, int]:
    """A stream id is milliseconds and a number; none is before all."""
    milliseconds, _, number = (announcement or "0-0").partition("-")
    return int(milliseconds), int(number)
