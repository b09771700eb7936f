"""How often a process may be started again: a rate, so that a long run outlives more crashes than a short one."""

import time
from collections import deque
from collections.abc import Callable


class RestartBudget:
    """At most `limit` restarts within any `window_seconds`."""

    def __init__(self, limit: int, window_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self.window_seconds, self._clock = limit, window_seconds, clock
        self._taken: deque[float] = deque()

    @property
    def left(self) -> int:
        now = self._clock()
        while self._taken and now - self._taken[0] >= self.window_seconds:
            self._taken.popleft()
        return self.limit - len(self._taken)

    def take(self) -> bool:
        """False when it is used up for now."""
        if self.left < 1:
            return False
        self._taken.append(self._clock())
        return True
