"""Scorer processes: many samples at once, and one that hangs is killed without harm to the others."""

import asyncio
from collections.abc import Sequence

from services.common.config import ScorerConfig
from services.common.errors import InvalidData, TrivetError, Unavailable
from services.common.logs import get_logger
from services.reward import metrics
from services.reward.isolation.containment import Containment
from services.reward.isolation.scorer_processes import ProcessDied, ScorerProcess, ScorerProcesses
from services.reward.scorers import check_name, labels
from services.reward.scorers.types import ScorerFailure

# A process that was killed is started again; one that does not come up is tried so often, so far apart.
START_TRIES = 3
START_PAUSE_SECONDS = 1.0

log = get_logger(__name__)


class ScorerPool:
    """`workers` processes with the scorers loaded. Runs on one event loop."""

    def __init__(
        self,
        scorers: Sequence[ScorerConfig],
        *,
        workers: int,
        timeout_seconds: float,
        containment: Containment | None = None,
    ) -> None:
        """Raises InvalidData("unknown_scorer")."""
        for scorer in scorers:
            check_name(scorer.name)
        self.scorers = list(scorers)
        self.labels = labels(scorers)
        self.deterministic: list[bool] = []
        self._workers, self._timeout = workers, timeout_seconds
        self._containment = containment or Containment()
        self._processes = ScorerProcesses(self.scorers, self._containment)
        self._opening = asyncio.Lock()
        self._keepers: list[asyncio.Task[None]] = []
        # A None says that no process will come any more.
        self._idle: asyncio.Queue[ScorerProcess | None] = asyncio.Queue()
        self._problem = Unavailable("pool_stopped", "the scorer pool is not running")
        self._idle.put_nowait(None)

    async def start(self) -> None:
        """Raises InvalidData when a scorer cannot be loaded, Unavailable when no process comes up."""
        await self._processes.start()
        try:
            process, words = await self._processes.add()
        except TrivetError:
            await self._processes.close()
            raise
        self.deterministic = words["deterministic"]
        write = log.warning if words["missing"] else log.info
        write("scorers_contained", user=self._processes.user, missing=words["missing"])
        self._idle.get_nowait()
        self._keepers = [
            asyncio.create_task(self._keep_one(process if slot == 0 else None)) for slot in range(self._workers)
        ]

    async def stop(self) -> None:
        """Kills what still runs."""
        if not self._keepers:
            return
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers = []
        self._idle.put_nowait(None)
        await self._processes.close()

    async def score(self, scorer: int, prompt: str, completion: str, metadata_json: str) -> float | ScorerFailure:
        """One try of scorer number `scorer`. Raises Unavailable when no scorer process can be started."""
        process = await self._take()
        request = {"scorer": scorer, "prompt": prompt, "completion": completion, "metadata": metadata_json}
        try:
            outcome = await process.call(request, self._timeout)
        except TimeoutError:
            return ScorerFailure(f"gave no score within {self._timeout:g} s and was killed", code="scorer_timeout")
        except ProcessDied as error:
            return ScorerFailure(str(error), code="scorer_crash")
        self._idle.put_nowait(process)
        return outcome

    async def _take(self) -> ScorerProcess:
        while True:
            process = await self._idle.get()
            if process is None:
                self._idle.put_nowait(None)
                raise self._problem
            if not process.ended.done():
                return process

    async def _keep_one(self, process: ScorerProcess | None) -> None:
        """Always one process, until none comes up any more."""
        failures = 0
        while True:
            try:
                process = process or await self._add()
            except (InvalidData, Unavailable) as error:
                failures += 1
                log.warning("scorer_process_not_started", reason=str(error), tries=failures)
                if failures == START_TRIES:
                    self._problem = Unavailable("scorer_start", str(error))
                    self._idle.put_nowait(None)
                    return
                await asyncio.sleep(START_PAUSE_SECONDS)
                continue
            failures = 0
            self._idle.put_nowait(process)
            await asyncio.wait({process.ended})
            process = None

    async def _add(self) -> ScorerProcess:
        async with self._opening:
            if not self._processes.open:
                log.warning("scorer_pool_replaced")
                metrics.POOL_RESTARTS.inc()
                await self._processes.close()
                self._processes = ScorerProcesses(self.scorers, self._containment)
                await self._processes.start()
        return (await self._processes.add())[0]
