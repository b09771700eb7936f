"""The process that keeps a run's Redis: it ends when it is asked to, and when the server that it started does."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from services.cli.shared.processes import free_port
from tests.support.leftovers import family, kill


def handles(pid: int, number: signal.Signals) -> bool:
    caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert caught is not None
    return bool(int(caught[1], 16) >> (number - 1) & 1)


@pytest.fixture
def keeper(tmp_path: Path):
    port = free_port()
    arguments = ["--directory", str(tmp_path), "--port", str(port)]
    command = [sys.executable, "-m", "services.cli.up.redis_server", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    # It watches its server once it handles SIGCHLD: until then, the server's end is a start that failed.
    while not handles(process.pid, signal.SIGCHLD):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with redis.Redis(port=port) as client:
        assert client.ping()
    yield process
    if process.poll() is None:
        kill(family(process.pid))
    process.communicate(timeout=10)


def test_it_ends_with_its_server_so_that_both_are_started_again(keeper) -> None:
    (server,) = family(keeper.pid)[1:]
    kill([server])
    assert keeper.wait(20) == 1
    assert "the server ended by itself" in keeper.stderr.read()


def test_it_takes_its_server_with_it_when_asked_to_end(keeper) -> None:
    (server,) = family(keeper.pid)[1:]
    keeper.terminate()
    assert keeper.wait(20) == 0
    assert not Path(f"/proc/{server}").exists()
