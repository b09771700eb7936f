"""`trivet up` that is stopped at every stage of a run: it ends within a bound, and leaves no process behind."""

import os
import pty
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from pathlib import Path

import pytest
import yaml

from services.cli.shared.processes import free_port
from services.common.exit_codes import FAILED
from tests.support.leftovers import Leftovers
from tests.support.runs.small_run import DIRECTORY, MODE, fork_context, up

PATIENCE_SECONDS = 60.0
STOPPED = 130
FORKS = fork_context()


class Run:
    """`output` is the end of a pipe, or of a terminal, from which what it prints is read."""

    def __init__(self, directory: Path, redis_url: str) -> None:
        self.directory, self.file = directory, directory / "run.yaml"
        self.tree = {
            "run": {"name": directory.name.replace("_", "-"), "directory": str(directory / "runs")},
            "model": {"path": "model"},
            "data": {"train": {"kind": "jsonl", "path": "rows.jsonl"}},
            "reward": {"scorers": [{"name": "exact_match"}]},
            "redis": {"url": redis_url},
        }
        self.output = -1

    def start(self, mode: str, *, terminal: bool = False, nohup: bool = False, **variables: str) -> None:
        self.file.write_text(yaml.safe_dump(self.tree), encoding="utf-8")
        self.output, theirs = pty.openpty() if terminal else os.pipe()
        kept = {name: value for name, value in os.environ.items() if name not in {"TERM", "NO_COLOR", "COLUMNS"}}
        environment = {**kept, **variables, MODE: mode, DIRECTORY: str(self.directory)}
        with Connection(theirs) as given:
            self.process = FORKS.Process(target=up, args=(given, self.file, environment, nohup))
            self.process.start()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def until(self, *files: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all((self.directory / file).exists() for file in files):
            assert self.process.is_alive(), self.rest()
            assert time.monotonic() < deadline, f"{files} are not there"
            time.sleep(0.02)

    def until_all_ready(self) -> None:
        self.until("rollout.ready", "reward.ready", "trainer.ready")

    def until_printed(self, words: str) -> str:
        said = b""
        while words.encode() not in said:
            said += (more := self._read())
            assert more, said.decode()
        return said.decode()

    def rest(self) -> str:
        said = b""
        while more := self._read():
            said += more
        return said.decode()

    def status(self) -> int:
        self.process.join(PATIENCE_SECONDS)
        return self.process.exitcode

    def close(self) -> None:
        if self.output >= 0:
            os.close(self.output)
            self.output = -1

    def _read(self) -> bytes:
        try:
            return os.read(self.output, 65_536)
        except OSError:
            # A terminal that the other side has left.
            return b""


@pytest.fixture
def run(tmp_path, redis_url) -> Iterator[Run]:
    made = Run(tmp_path, redis_url)
    # The server that forks stays.
    ensure_running()
    with Leftovers() as leftovers:
        yield made
        made.close()
        assert leftovers.found() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("mode", ["loading", "training"])
def test_any_request_to_end_ends_all_processes(run, mode, number):
    if mode == "training":
        # One of its own.
        del run.tree["redis"]
    run.start(mode)
    run.until_all_ready()
    run.signal(number)
    assert run.status() == STOPPED
    said = run.rest()
    assert "stopping: finishing the step and writing a checkpoint" in said
    assert f"Resume with: trivet up {run.file}" in said


def test_one_that_comes_while_redis_is_waited_for(run):
    run.tree["redis"] = {"url": f"redis://127.0.0.1:{free_port()}/0", "retry_seconds": 600}
    run.start("training")
    run.until_printed("waiting for it")
    run.signal(signal.SIGINT)
    assert run.status() == STOPPED
    assert not list(run.directory.glob("*.ready"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_that_comes_while_the_model_is_prepared(run, number):
    script = f"touch {run.directory}/prepare.ready; sleep 600; true"
    run.tree["prepare"] = {"command": ["sh", "-c", script], "creates": "model"}
    run.start("training")
    run.until("prepare.ready")
    run.signal(number)
    assert run.status() == STOPPED


def test_a_second_one_ends_what_does_not_stop(run):
    run.start("stuck")
    run.until_all_ready()
    run.signal(signal.SIGINT)
    run.until("trainer.asked")
    assert run.process.is_alive()
    run.signal(signal.SIGINT)
    assert run.status() == STOPPED


def test_nohup_keeps_a_run_that_its_terminal_leaves(run):
    run.start("training", nohup=True)
    run.until_all_ready()
    run.signal(signal.SIGHUP)
    run.until_printed("the trainer is starting")
    assert run.process.is_alive()
    run.signal(signal.SIGTERM)
    assert run.status() == STOPPED


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_whose_output_is_closed_stops_in_order_all_the_same(run, terminal):
    run.start("training", terminal=terminal, TERM="xterm")
    run.until_all_ready()
    run.close()
    run.signal(signal.SIGHUP)
    assert run.status() == STOPPED


def test_what_ends_at_once_is_reported_and_all_else_is_ended(run):
    run.tree["run"]["restarts"] = 0
    run.start("failing")
    assert run.status() == FAILED
    assert "failed: " in run.rest()


@pytest.mark.parametrize(
    ("variables", "drawn"),
    [({"TERM": "xterm"}, True), ({"TERM": "xterm", "NO_COLOR": "1"}, True), ({"TERM": "dumb"}, False), ({}, False)],
)
def test_only_a_terminal_that_can_be_drawn_on_is(run, variables, drawn):
    run.start("training", terminal=True, COLUMNS="30", **variables)
    said = run.until_printed("the trainer is starting")
    assert ("\x1b[" in said) == drawn
    # Colours are 30 to 38 and 90 to 97.
    assert "\x1b[3" not in said
    run.signal(signal.SIGINT)
    assert run.status() == STOPPED
