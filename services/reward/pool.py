"""Scorer processes: many samples at once, and one that hangs is killed without harm to the others."""

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

from pebble import CONSTS, ProcessExpired, ProcessPool

from services.common.config import ScorerConfig
from services.common.errors import InvalidData, Unavailable
from services.common.logs import get_logger
from services.reward import metrics, process
from services.reward.scorers import BUILT_IN, check_name, labels
from services.reward.types import ScorerFailure

START_SECONDS = 120.0
# How often a wait makes sure that the pool behind it still lives.
LIVENESS_SECONDS = 1.0
# A process that is not gone so long after its timeout will not go: the pool is replaced.
STUCK_SECONDS = 30.0
# SIGTERM ends a scorer at once unless it asked to be spared; while pebble waits for one of those, the others wait too.
CONSTS.term_timeout = 0.3

log = get_logger(__name__)


class ScorerPool:
    """`workers` processes with the scorers loaded. Runs on one event loop.

    A fork server makes the processes: they start fast after a kill, and inherit no thread and no lock of this process.
    """

    def __init__(self, scorers: Sequence[ScorerConfig], *, workers: int, timeout_seconds: float) -> None:
        """Raises InvalidData("unknown_scorer")."""
        for scorer in scorers:
            check_name(scorer.name)
        self.scorers = list(scorers)
        self.labels = labels(scorers)
        self.deterministic: list[bool] = []
        self._workers, self._timeout = workers, timeout_seconds
        self._context = multiprocessing.get_context("forkserver")
        preload = [BUILT_IN[scorer.name] for scorer in scorers if scorer.name in BUILT_IN]
        self._context.set_forkserver_preload([process.__name__, *preload])
        self._pool: ProcessPool | None = None
        self._replacing = asyncio.Lock()

    async def start(self) -> None:
        """Raises InvalidData when a scorer cannot be loaded, Unavailable when no process comes up."""
        self._pool = await asyncio.to_thread(self._open)

    async def stop(self) -> None:
        """Kills what still runs."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await asyncio.to_thread(_close, pool)

    async def score(self, scorer: int, prompt: str, completion: str, metadata_json: str) -> float | ScorerFailure:
        """One try of scorer number `scorer`. Raises Unavailable when a broken pool cannot be replaced."""
        pool = self._pool
        if pool is None:
            raise Unavailable("pool_stopped", "the scorer pool is not running")
        try:
            future = pool.schedule(process.run, args=(scorer, prompt, completion, metadata_json), timeout=self._timeout)
            return await self._result(pool, future)
        except TimeoutError:
            return ScorerFailure(f"gave no score within {self._timeout:g} s and was killed", code="scorer_timeout")
        except ProcessExpired as error:
            return ScorerFailure(f"its process died with exit code {error.exitcode}", code="scorer_crash")
        except (BrokenProcessPool, RuntimeError) as error:
            await self._replace(pool, str(error))
            return ScorerFailure(f"the scorer pool broke ({error})", code="scorer_crash")

    async def _result(self, pool: ProcessPool, future: Future[float | ScorerFailure]) -> float | ScorerFailure:
        waiting = asyncio.wrap_future(future)
        running_since: float | None = None
        try:
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=LIVENESS_SECONDS)
                if waiting.done():
                    break
                # Tasks that were still queued when a pool broke would be waited for in vain.
                if not pool.active:
                    raise BrokenProcessPool("it stopped")
                if future.running():
                    running_since = running_since or time.monotonic()
                    if time.monotonic() - running_since > self._timeout + STUCK_SECONDS:
                        raise BrokenProcessPool("a process could not be killed")
            return waiting.result()
        finally:
            waiting.cancel()

    async def _replace(self, broken: ProcessPool, reason: str) -> None:
        async with self._replacing:
            if self._pool is not broken:
                return
            log.warning("scorer_pool_replaced", reason=reason)
            metrics.POOL_RESTARTS.inc()
            await asyncio.to_thread(_close, broken)
            self._pool = await asyncio.to_thread(self._open)

    def _open(self) -> ProcessPool:
        configs = [scorer.model_dump(mode="json") for scorer in self.scorers]
        pool = ProcessPool(self._workers, initializer=process.prepare, initargs=(configs,), context=self._context)
        try:
            description = pool.schedule(process.describe, timeout=START_SECONDS).result(START_SECONDS)
        except (TimeoutError, ProcessExpired, RuntimeError) as error:
            _close(pool)
            raise Unavailable("scorer_start", f"no scorer process came up: {error or type(error).__name__}") from error
        if isinstance(description, tuple):
            _close(pool)
            raise InvalidData(*description)
        self.deterministic = description
        return pool


def _close(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()
