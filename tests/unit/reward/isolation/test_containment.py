"""What scorers can reach, and what becomes of what they start. With real processes."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.config import RewardConfig
from services.common.errors import InvalidData
from services.reward.isolation.containment import Containment, User, contain, find_user
from tests.support.reward.evil_scorers import REACHES as REACHED_FOR
from tests.support.reward.pools import OpenPool, eventually, is_alive

ALLOCATES, DAEMON, FAMILY, REACHES, RUNNER = (
    f"tests.support.reward.evil_scorers:{name}" for name in ("allocates", "daemon", "family", "reaches", "runner")
)


async def test_memory_is_limited_and_more_is_a_failure_of_that_sample():
    async with OpenPool(ALLOCATES, workers=1, memory_mib=512) as pool:
        assert await pool.score(ALLOCATES, "200") == 1.0
        outcome = await pool.score(ALLOCATES, "3000")
        assert outcome.code == "scorer_error"
        assert "MemoryError: , more than reward.scorer_memory_mib allows" in outcome.reason
        assert await pool.score(ALLOCATES, "200") == 1.0


async def test_the_built_in_scorers_need_less_memory_than_the_least_that_can_be_configured(monkeypatch):
    least = RewardConfig.model_fields["scorer_memory_mib"].metadata[0].ge
    names = ["exact_match", "numeric", "regex", "math_verify", "reasoning_gym"]
    async with OpenPool(*names, workers=1, memory_mib=least) as pool:
        gym = {"answer": "4", "metadata": {"source_dataset": "chain_sum"}}
        assert await pool.score("reasoning_gym", "4", json.dumps(gym)) == 1.0
        assert await pool.score("math_verify", "$\\frac{2}{4}$", '{"answer": "0.5"}') == 1.0


@pytest.mark.parametrize("end", ["timeout", "pool"])
async def test_what_a_scorer_starts_ends_with_it(open_path, end):
    trace = str(open_path / "trace")
    async with OpenPool(DAEMON, workers=1, timeout_seconds=2 if end == "timeout" else 30) as pool:
        scoring = asyncio.create_task(
            pool.score(DAEMON, "hang" if end == "timeout" else "", json.dumps({"trace": trace}))
        )
        child = await asyncio.to_thread(_started, trace + ".child")
        outcome = await scoring
        if end == "timeout":
            assert outcome.code == "scorer_timeout"
            await asyncio.to_thread(eventually, lambda: not is_alive(child))
        else:
            assert outcome == 1.0
            assert is_alive(child)
        # Its parent has ended: so does it, although it has a session of its own.
        daemon = await asyncio.to_thread(_started, trace + ".daemon")
        await asyncio.to_thread(eventually, lambda: not is_alive(daemon))
    assert not is_alive(child)


@pytest.mark.parametrize("killed", ["fork server", "its parent"])
async def test_what_a_scorer_starts_ends_although_a_process_of_the_pool_is_killed(open_path, killed):
    trace = str(open_path / "trace")
    async with OpenPool(DAEMON, workers=1) as pool:
        scoring = asyncio.create_task(pool.score(DAEMON, "hang", json.dumps({"trace": trace})))
        child = await asyncio.to_thread(_started, trace + ".child")
        server = _parent(_parent(child))
        if killed == "fork server":
            os.kill(server, signal.SIGKILL)
            await asyncio.to_thread(eventually, lambda: not is_alive(child))
        else:
            os.kill(_parent(server), signal.SIGKILL)
    assert (await scoring).code == "scorer_crash"
    for pid in (child, server):
        await asyncio.to_thread(eventually, lambda pid=pid: not is_alive(pid))


async def test_a_process_that_runs_away_by_forking_is_caught(open_path):
    trace = open_path / "trace"
    async with OpenPool(RUNNER, workers=1) as pool:
        assert await pool.score(RUNNER, "", json.dumps({"trace": str(trace)})) == 1.0
        await asyncio.to_thread(eventually, lambda: trace.exists() and trace.stat().st_size)
    # Each of its lives, of a few milliseconds, adds a byte.
    size = trace.stat().st_size
    await asyncio.sleep(0.2)
    assert trace.stat().st_size == size


async def test_a_family_of_processes_that_fork_all_the_time_ends_with_its_call(open_path):
    trace = open_path / "trace"
    async with OpenPool(FAMILY, workers=1, timeout_seconds=1.0) as pool:
        outcome = await pool.score(FAMILY, "", json.dumps({"trace": str(trace)}))
        assert outcome.code == "scorer_timeout"
        pids = [int(pid) for pid in trace.read_text().split()]
        assert len(pids) == 16
        await asyncio.to_thread(eventually, lambda: not any(is_alive(pid) for pid in pids))


SERVICE = """
import asyncio, json, os, sys
from services.common.config import ScorerConfig
from services.reward.isolation.containment import Containment, protect_service
from services.reward.isolation.pool import ScorerPool

async def main():
    protect_service()
    scorer, metadata, *completions = sys.argv[1:]
    allowed = Containment(environment=["TRACE"])
    pool = ScorerPool([ScorerConfig(name=scorer)], workers=1, timeout_seconds=100, containment=allowed)
    await pool.start()
    for completion in completions:
        outcome = await pool.score(0, "", completion, json.dumps({"pid": os.getpid(), **json.loads(metadata)}))
        print(outcome.reason if hasattr(outcome, "reason") else outcome, flush=True)
    await pool.stop()

asyncio.run(main())
"""


def start_service(scorer, *completions, **metadata):
    paths = [str(Path(__file__).parent), *(path for path in sys.path if path)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "SECRET": "redis://:s3cret@host",
        "TRACE": "seen",
    }
    return subprocess.Popen(
        [sys.executable, "-c", SERVICE, scorer, json.dumps(metadata), *completions],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def reached():
    """What the scorer `reaches` came by, for each that it reached for, in a service of its own."""
    # What would end the service comes last.
    names = sorted(REACHED_FOR, key="kill".__eq__)
    service = start_service(REACHES, *names)
    output, _ = service.communicate(timeout=60)
    assert service.returncode == 0
    # Its log comes first.
    return dict(zip(names, map(json.loads, output.splitlines()[-len(names) :]), strict=True))


def test_nothing_outlives_a_service_that_is_killed(open_path):
    trace = str(open_path / "trace")
    service = start_service(DAEMON, "hang", trace=trace)
    try:
        child = _started(trace + ".child")
        scorer = _parent(child)
        server = _parent(scorer)
        waiting = _parent(server)
    finally:
        service.kill()
        service.communicate(timeout=10)
    for pid in (child, scorer, server, waiting):
        eventually(lambda pid=pid: not is_alive(pid))


def test_scorers_see_the_variables_that_are_allowed_and_no_other(reached):
    environment = reached["environment"]
    assert environment["TRACE"] == "seen"
    assert environment["PATH"] == os.environ["PATH"]
    assert "SECRET" not in environment
    assert "s3cret" not in json.dumps(environment)


@pytest.mark.parametrize("what", ["service's environment", "service's memory"])
def test_scorers_cannot_read_the_service(reached, what):
    assert reached[what] in {"EACCES", "EPERM"}


def test_scorers_cannot_end_the_service(reached):
    assert reached["kill"] == "EPERM"


def test_scorers_have_no_privileges_no_core_dumps_and_limits(reached):
    status = reached["status"]
    assert (status["CapEff"], status["CapPrm"], status["NoNewPrivs"]) == ("0" * 16, "0" * 16, "1")
    assert reached["limits"] == [[0, 0], [1_024] * 2, [2**34] * 2, [2**31] * 2]
    assert reached["session"] is True
    assert reached["oom score"] == "500"
    # The one to the service: not the fork server's.
    assert reached["sockets"] == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change its user")
def test_root_hands_scorers_to_another_user():
    reading, writing = os.pipe()
    parent = os.getpid()
    if (child := os.fork()) == 0:
        missing = contain(256, User("nobody", 65_534, 65_534, "/nonexistent"), parent)
        found = {"ids": [*os.getresuid(), *os.getresgid(), *os.getgroups()], "missing": missing}
        found["home"] = os.environ["HOME"]
        for path in ("/proc/1/environ", "/etc/shadow"):
            found[path] = os.access(path, os.R_OK)
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = json.load(pipe)
    os.waitpid(child, 0)
    assert found.pop("missing") in ([], ["landlock"])
    assert found.pop("home") == "/nonexistent"
    assert found == {"ids": [65_534] * 6, "/proc/1/environ": False, "/etc/shadow": False}


def test_a_user_that_scorers_cannot_run_as_is_named():
    with pytest.raises(InvalidData, match="reward.scorer_user is 'no-such-user', expected a user of this machine"):
        find_user("no-such-user")


async def test_an_unusable_user_is_refused_before_anything_is_scored():
    with pytest.raises(InvalidData, match=r"reward\.scorer_user is 'no-such-user'"):
        async with OpenPool("length", user="no-such-user"):
            pass


def test_variables_by_name_are_passed_on_and_others_are_not():
    given = {"PATH": "/bin", "HF_TOKEN": "x", "LC_ALL": "C", "TRIVET__REDIS__URL": "redis://:x@h", "JUDGE_KEY": "y"}
    kept = Containment(environment=["JUDGE_KEY"]).variables(given)
    assert kept.pop("PYTHONPATH")
    assert kept == {
        "PATH": "/bin",
        "LC_ALL": "C",
        "JUDGE_KEY": "y",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _started(trace):
    return int(eventually(lambda: Path(trace).exists() and Path(trace).read_text()))


def _parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
