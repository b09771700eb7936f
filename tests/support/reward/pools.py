"""What the tests of scorer processes share."""

import time
from pathlib import Path

from services.common.config import ScorerConfig
from services.reward.isolation.containment import Containment
from services.reward.isolation.pool import ScorerPool
from services.reward.scorers import BUILT_IN


class OpenPool:
    """A started pool of test scorers, called by name."""

    def __init__(self, *names, workers=2, timeout_seconds=30.0, **containment):
        self._names = list(names)
        configs = [
            ScorerConfig(name=name if ":" in name or name in BUILT_IN else f"tests.support.reward.scorers:{name}")
            for name in names
        ]
        self.pool = ScorerPool(
            configs, workers=workers, timeout_seconds=timeout_seconds, containment=Containment(**containment)
        )

    async def __aenter__(self):
        await self.pool.start()
        return self

    async def __aexit__(self, *_):
        await self.pool.stop()

    async def score(self, name, completion="", metadata_json="{}"):
        return await self.pool.score(self._names.index(name), "prompt", completion, metadata_json)


def is_alive(pid):
    """A zombie is not: it waits for whoever is process 1 here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value
