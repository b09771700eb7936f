import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from services.common.config import ScorerConfig
from services.common.errors import InvalidData, Unavailable
from services.reward.isolation.pool import ScorerPool
from services.reward.scorers.types import ScorerFailure
from tests.support.reward.pools import OpenPool, eventually, is_alive

SHARED_LOOP = pytest.mark.asyncio(loop_scope="module")


async def test_samples_are_scored_in_parallel_by_warm_processes(open_path):
    async with OpenPool("meets", "process_id", workers=2) as open_pool:
        # Each waits for the other: in turn, the first would never end.
        metadata = [
            json.dumps({"me": str(open_path / me), "other": str(open_path / other)}) for me, other in ("ab", "ba")
        ]
        values = await asyncio.gather(*(open_pool.score("meets", metadata_json=each) for each in metadata))
        assert values == [1.0, 1.0]
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
        assert all(not is_alive(pid) for pid in gone)
        assert await open_pool.score(name, "fine") == 1.0


async def test_a_process_that_dies_takes_only_its_own_sample_with_it():
    async with OpenPool("dies_when_asked", workers=2) as open_pool:
        completions = ["fine"] * 10 + ["die"] + ["fine"] * 10
        outcomes = await asyncio.wait_for(
            asyncio.gather(*(open_pool.score("dies_when_asked", completion) for completion in completions)), 20
        )
        assert outcomes[10].code == "scorer_crash"
        assert outcomes[:10] + outcomes[11:] == [1.0] * 20


async def test_a_call_that_is_given_up_ends_its_process_and_not_the_pool(open_path):
    async with OpenPool("meets", "process_id", workers=1) as open_pool:
        victim = int(await open_pool.score("process_id"))
        begun = open_path / "begun"
        metadata = json.dumps({"me": str(begun), "other": str(open_path / "nobody")})
        call = asyncio.create_task(open_pool.score("meets", metadata_json=metadata))
        waiting = asyncio.create_task(open_pool.score("process_id"))
        await asyncio.to_thread(eventually, begun.exists)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await asyncio.wait_for(waiting, 20) != victim
        await asyncio.to_thread(eventually, lambda: not is_alive(victim))


async def test_an_idle_process_that_is_killed_is_replaced():
    async with OpenPool("process_id", workers=1) as open_pool:
        victim = int(await open_pool.score("process_id"))
        os.kill(victim, signal.SIGKILL)
        outcomes = await _until_scored(open_pool)
        assert outcomes[-1] != victim
        # At most the one that was asked before its end had been noticed.
        assert len(outcomes) <= 2


async def test_a_fork_server_that_is_killed_is_replaced_with_all_that_it_started():
    async with OpenPool("process_id", workers=2) as open_pool:
        before = _restarts()
        victim = int(await open_pool.score("process_id"))
        os.kill(_parent(victim), signal.SIGKILL)
        await asyncio.to_thread(eventually, lambda: _restarts() - before == 1 and not is_alive(victim))
        assert victim not in await _until_scored(open_pool)


async def test_scorers_that_no_longer_load_end_the_pool_with_a_reason(tmp_path, monkeypatch):
    module = tmp_path / "vanishing_scorers.py"
    module.write_text("import os\n\ndef die(prompt, completion, metadata):\n    os.abort()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("services.reward.isolation.pool.START_PAUSE_SECONDS", 0.01)
    async with OpenPool("vanishing_scorers:die", workers=1) as open_pool:
        module.unlink()
        assert (await open_pool.score("vanishing_scorers:die")).code == "scorer_crash"
        with pytest.raises(Unavailable, match="no module 'vanishing_scorers'"):
            await asyncio.wait_for(open_pool.score("vanishing_scorers:die"), 30)


async def _until_scored(open_pool):
    outcomes = []
    while not outcomes or isinstance(outcomes[-1], ScorerFailure):
        outcomes.append(await asyncio.wait_for(open_pool.score("process_id"), 20))
        assert len(outcomes) < 5
    return outcomes


def _parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


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
@SHARED_LOOP
async def test_what_is_not_a_number_is_a_failure(shared_pool, name, code, words):
    outcome = await shared_pool.score(name)
    assert isinstance(outcome, ScorerFailure)
    assert outcome.code == code
    assert words in outcome.reason


@SHARED_LOOP
async def test_a_boolean_is_a_number(shared_pool):
    assert await shared_pool.score("returns_true") == 1.0


@SHARED_LOOP
async def test_a_coroutine_is_awaited_in_the_scorer_process(shared_pool):
    assert [await shared_pool.score(name) for name in ("awaited", "awaits_inside") * 2] == [0.75, 1.0, 0.75, 1.0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_pool():
    names = ["raises", "raises_unpicklable", "leaves", "returns_text", "returns_nan", "returns_failure"]
    async with OpenPool(
        *names, "returns_unknown_code", "returns_true", "awaited", "awaits_inside", workers=1
    ) as open_pool:
        yield open_pool


def test_an_unknown_scorer_is_refused_before_any_process_starts():
    with pytest.raises(InvalidData, match="expected one of") as caught:
        ScorerPool([ScorerConfig(name="exactmatch")], workers=1, timeout_seconds=1.0)
    assert caught.value.code == "unknown_scorer"


async def test_a_scorer_that_does_not_load_is_refused_at_the_start():
    pool = ScorerPool([ScorerConfig(name="tests.support.reward.scorers:absent")], workers=1, timeout_seconds=1.0)
    with pytest.raises(InvalidData, match="no function 'absent'") as caught:
        await pool.start()
    assert caught.value.code == "unknown_scorer"


async def test_a_pool_that_is_not_running_says_so():
    pool = ScorerPool([ScorerConfig(name="exact_match")], workers=1, timeout_seconds=1.0)
    with pytest.raises(Unavailable, match="not running"):
        await pool.score(0, "", "", "{}")


def _restarts():
    return REGISTRY.get_sample_value("trivet_reward_pool_restarts_total")
