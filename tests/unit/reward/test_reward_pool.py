import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from services.common.config import ScorerConfig
from services.common.errors import InvalidData, Unavailable
from services.reward.pool import ScorerPool
from services.reward.types import ScorerFailure


class OpenPool:
    """A started pool of test scorers, called by name."""

    def __init__(self, *names, workers=2, timeout_seconds=30.0):
        self._names = list(names)
        configs = [ScorerConfig(name=name if ":" in name else f"reward_test_scorers:{name}") for name in names]
        self.pool = ScorerPool(configs, workers=workers, timeout_seconds=timeout_seconds)

    async def __aenter__(self):
        await self.pool.start()
        return self

    async def __aexit__(self, *_):
        await self.pool.stop()

    async def score(self, name, completion="", metadata_json="{}"):
        return await self.pool.score(self._names.index(name), "prompt", completion, metadata_json)


async def test_samples_are_scored_in_parallel_by_warm_processes():
    async with OpenPool("sleepy", "process_id", workers=2) as open_pool:
        start = time.monotonic()
        values = await asyncio.gather(*(open_pool.score("sleepy", metadata_json='{"seconds": 0.5}') for _ in range(4)))
        assert all(isinstance(value, float) for value in values)
        # In turn it would take 2 s.
        assert time.monotonic() - start < 1.8
        assert os.getpid() not in {await open_pool.score("process_id") for _ in range(4)}


@pytest.mark.parametrize("name", ["endless_when_asked", "stubborn"])
async def test_a_scorer_that_hangs_is_killed_and_the_others_go_on(name):
    async with OpenPool(name, "process_id", workers=2, timeout_seconds=0.5) as open_pool:
        before = {int(await open_pool.score("process_id")) for _ in range(20)}
        outcomes = await asyncio.wait_for(
            asyncio.gather(*(open_pool.score(name, completion) for completion in ["hang"] + ["fine"] * 20)), 20
        )
        assert outcomes[0] == ScorerFailure("gave no score within 0.5 s and was killed", code="scorer_timeout")
        assert outcomes[1:] == [1.0] * 20
        after = {int(await open_pool.score("process_id")) for _ in range(20)}
        gone = before - after
        assert all(not _alive(pid) for pid in gone)
        assert await open_pool.score(name, "fine") == 1.0


async def test_a_process_that_dies_takes_only_its_own_sample_with_it():
    async with OpenPool("dies_when_asked", workers=2) as open_pool:
        completions = ["fine"] * 10 + ["die"] + ["fine"] * 10
        outcomes = await asyncio.wait_for(
            asyncio.gather(*(open_pool.score("dies_when_asked", completion) for completion in completions)), 20
        )
        assert outcomes[10].code == "scorer_crash"
        assert outcomes[:10] + outcomes[11:] == [1.0] * 20


async def test_a_pool_whose_idle_processes_are_killed_is_replaced():
    async with OpenPool("process_id", workers=1) as open_pool:
        before = _restarts()
        victim = int(await open_pool.score("process_id"))
        os.kill(victim, signal.SIGKILL)
        outcomes = []
        while not outcomes or isinstance(outcomes[-1], ScorerFailure):
            outcomes.append(await asyncio.wait_for(open_pool.score("process_id"), 20))
            assert len(outcomes) < 5
        assert outcomes[-1] != victim
        assert all(outcome.code == "scorer_crash" and outcome.retryable for outcome in outcomes[:-1])
        assert _restarts() - before == len(outcomes[:-1])


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("raises", "scorer_error", "KeyError: 'nothing here'"),
        ("raises_unpicklable", "scorer_error", "Unpicklable: first"),
        ("leaves", "scorer_error", "SystemExit: 3"),
        ("returns_text", "scorer_error", "returned str"),
        ("returns_nan", "reward_not_finite", "returned nan"),
        ("returns_failure", "scorer_error", "the judge is out to lunch"),
        ("returns_unknown_code", "scorer_error", "odd"),
    ],
)
async def test_what_is_not_a_number_is_a_failure(shared_pool, name, code, words):
    outcome = await shared_pool.score(name)
    assert isinstance(outcome, ScorerFailure)
    assert outcome.code == code
    assert words in outcome.reason


async def test_a_boolean_is_a_number(shared_pool):
    assert await shared_pool.score("returns_true") == 1.0


@pytest.fixture
async def shared_pool():
    names = ["raises", "raises_unpicklable", "leaves", "returns_text", "returns_nan", "returns_failure"]
    async with OpenPool(*names, "returns_unknown_code", "returns_true", workers=1) as open_pool:
        yield open_pool


def test_an_unknown_scorer_is_refused_before_any_process_starts():
    with pytest.raises(InvalidData, match="expected one of") as caught:
        ScorerPool([ScorerConfig(name="exactmatch")], workers=1, timeout_seconds=1.0)
    assert caught.value.code == "unknown_scorer"


async def test_a_scorer_that_does_not_load_is_refused_at_the_start():
    pool = ScorerPool([ScorerConfig(name="reward_test_scorers:absent")], workers=1, timeout_seconds=1.0)
    with pytest.raises(InvalidData, match="no function 'absent'") as caught:
        await pool.start()
    assert caught.value.code == "unknown_scorer"


async def test_a_pool_that_is_not_running_says_so():
    pool = ScorerPool([ScorerConfig(name="exact_match")], workers=1, timeout_seconds=1.0)
    with pytest.raises(Unavailable, match="not running"):
        await pool.score(0, "", "", "{}")


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _restarts():
    return REGISTRY.get_sample_value("trivet_reward_pool_restarts_total")


SERVICE_THAT_IS_KILLED = """
import asyncio
from services.common.config import ScorerConfig
from services.reward.pool import ScorerPool

async def main():
    pool = ScorerPool([ScorerConfig(name="reward_test_scorers:hangs_with_trace")], workers=1, timeout_seconds=100)
    await pool.start()
    await pool.score(0, "", "", "{}")

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_scorer_that_hangs_does_not_outlive_a_killed_service(tmp_path):
    script, trace = tmp_path / "service.py", tmp_path / "pid"
    script.write_text(SERVICE_THAT_IS_KILLED)
    paths = [str(Path(__file__).parent), *(path for path in sys.path if path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRACE": str(trace)}
    service = subprocess.Popen([sys.executable, str(script)], env=environment)
    try:
        scorer = _eventually(lambda: trace.exists() and trace.read_text())
    finally:
        service.kill()
        service.wait(5)
    _eventually(lambda: not _alive(int(scorer)))


def _eventually(condition):
    deadline = time.monotonic() + 20
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value
