"""Waits for what is unavailable: with backoff, logged once, and not forever."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.backoff import ExponentialBackoff

from services.common import metrics
from services.common.errors import Outage, Unavailable
from services.common.logs import get_logger

FIRST_SECONDS, CAP_SECONDS, POLL_CAP_SECONDS = 0.1, 5.0, 1.0

T = TypeVar("T")

log = get_logger(__name__)


class Outages:
    """The outages that one service waits for. Each is counted and logged once, and again when it is over."""

    def __init__(self, limit_seconds: float, waited_for: tuple[type[Unavailable], ...] = (Outage,)) -> None:
        """What is `waited_for`, for at most `limit_seconds`, is an outage."""
        self._limit, self._waited_for = limit_seconds, waited_for
        self._backoff = ExponentialBackoff(cap=CAP_SECONDS, base=FIRST_SECONDS)
        # By code: how many wait, since when, and the newest error.
        self._waiting: dict[str, int] = {}
        self._since: dict[str, float] = {}
        self._errors: dict[str, Unavailable] = {}
        self._polling: _Wait | None = None

    @property
    def problem(self) -> str | None:
        """What is being waited for, for /readyz. Any thread may ask."""
        return "; ".join(f"waiting: {error}" for error in list(self._errors.values())) or None

    async def ride_out(self, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` returns once it meets no outage. Raises the error of one over the limit."""
        with _Wait(self) as wait:
            while True:
                try:
                    return await work()
                except self._waited_for as error:
                    await asyncio.sleep(wait.seconds_after(error))

    def ride_out_blocking(self, work: Callable[[], T]) -> T:
        """Like `ride_out`, in a thread that may wait."""
        with _Wait(self) as wait:
            while True:
                try:
                    return work()
                except self._waited_for as error:
                    time.sleep(wait.seconds_after(error))

    def poll(self, work: Callable[[], T]) -> T | None:
        """Like `ride_out_blocking`, for a caller that has other things to do in between: None while an outage lasts,
        after a short wait."""
        try:
            result = work()
        except self._waited_for as error:
            self._polling = self._polling or _Wait(self)
            time.sleep(min(POLL_CAP_SECONDS, self._polling.seconds_after(error)))
            return None
        if self._polling is not None:
            self._polling.__exit__()
            self._polling = None
        return result

    def began(self, error: Unavailable) -> None:
        """One more waits. Raises the error when the outage exceeds the limit."""
        code = error.code
        if code not in self._since:
            self._since[code] = time.monotonic()
            metrics.OUTAGES.labels(code).inc()
            log.warning("outage", code=code, reason=str(error))
        self._waiting[code] = self._waiting.get(code, 0) + 1
        self._errors[code] = error

    def still_lasts(self, error: Unavailable) -> None:
        """Raises the error when the outage is over the limit."""
        self._errors[error.code] = error
        if time.monotonic() - self._since[error.code] > self._limit:
            raise error

    def over(self, code: str) -> None:
        """One stops waiting."""
        self._waiting[code] -= 1
        if self._waiting[code] == 0:
            log.info("outage over", code=code, seconds=round(time.monotonic() - self._since[code], 1))
            for kept in (self._waiting, self._since, self._errors):
                del kept[code]

    def backoff(self, failures: int) -> float:
        return self._backoff.compute(failures)


class _Wait:
    """One who waits, from the first failure to the end of its work."""

    def __init__(self, outages: Outages) -> None:
        self._outages, self._codes, self._failures = outages, dict[str, None](), 0

    def __enter__(self) -> "_Wait":
        return self

    def seconds_after(self, error: Unavailable) -> float:
        if error.code not in self._codes:
            self._codes[error.code] = None
            self._outages.began(error)
        self._outages.still_lasts(error)
        self._failures += 1
        return self._outages.backoff(self._failures - 1)

    def __exit__(self, *_: object) -> None:
        for code in self._codes:
            self._outages.over(code)
