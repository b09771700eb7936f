import os
import subprocess
import sys

import pytest

from services.cli.up.run_lock import RunTaken, run_lock

HOLDING = """
import sys
from pathlib import Path
from services.cli.up.run_lock import run_lock
with run_lock(Path(sys.argv[1])) as lock:
    print("held", flush=True)
    sys.stdin.read()
"""


def holding(directory):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_one_is_refused_with_the_process_that_holds_it(tmp_path):
    first = holding(tmp_path)
    with pytest.raises(RunTaken, match=rf"in use by another `trivet up` \(process {first.pid}\)"), run_lock(tmp_path):
        pass
    first.communicate("", timeout=10)
    with run_lock(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_killed_one_holds_it_no_longer(tmp_path):
    first = holding(tmp_path)
    first.kill()
    first.wait()
    with run_lock(tmp_path):
        pass


def test_services_that_outlive_a_killed_one_still_hold_it(tmp_path):
    with run_lock(tmp_path) as lock:
        service = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    (tmp_path / "lock").write_text("1\n")
    said = rf"an ended `trivet up` left behind: end them first \(kill {service.pid}\)"
    with pytest.raises(RunTaken, match=said), run_lock(tmp_path):
        pass
    service.communicate(b"\n", timeout=10)
    with run_lock(tmp_path):
        pass
