"""A run by `trivet up`: two ranks under ZeRO-3, every step recorded, ended by Ctrl-C and resumed."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from services.common.run_files.run_log import RunLog
from services.trainer.checkpoint.directory import Checkpoints
from tests.support.leftovers import Leftovers, family, kill
from tests.support.runs.quickstart_run import quickstart_tree

STEPS, GROUPS = 4, 8
RATE = ("--set", "trainer.optimizer.learning_rate=3.0e-4")


@dataclass(frozen=True)
class Ended:
    """A command's status, what it printed, and the processes that it left behind."""

    status: int
    output: str
    left: list[str]


@dataclass(frozen=True)
class Run:
    file: Path
    directory: Path
    # Beside the first one; the first one, ended by Ctrl-C; what resumed it; once more when it was finished.
    second: Ended
    interrupted: Ended
    resumed: Ended
    repeated: Ended
    first_process: int
    # The newest checkpoint's step after Ctrl-C.
    stopped_at: int


def write_configuration(directory: Path, model: Path) -> Path:
    """Parameters sharded as small as they are, all four mechanisms on."""
    tree = quickstart_tree(model)
    tree["run"]["directory"] = str(directory / "runs")
    # The model is hardly warmed up: whether its last digit is even varies, whether it is right hardly ever.
    tree["reward"] = {"scorers": [{"name": "regex", "options": {"pattern": "[02468]$"}}]}
    tree["evaluation"] = {"every": 0, "prompts": 8, "samples": 2}
    tree["trainer"] |= {
        "steps": STEPS,
        "groups_per_step": GROUPS,
        "processes": 2,
        "zero_stage": 3,
        "recording": {"every": 1},
        "deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
    }
    file = directory / "run.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return file


def interrupt_and_resume(config_file: Path) -> Run:
    directory = config_file.parent / "runs" / "quickstart"
    with Leftovers() as leftovers:
        first = up(config_file, *RATE)
        try:
            _until(first, (directory / "logs" / "trainer.log").exists, "trainer that starts")
            second = ended(up(config_file), 60)
            _until(first, lambda: bool(RunLog(directory).steps()), "first step")
            first.send_signal(signal.SIGINT)
            interrupted = ended(first, 120, leftovers)
        finally:
            if first.poll() is None:
                kill(family(first.pid))
        saved = Checkpoints(directory / "checkpoints", keep=3).latest()
        assert saved is not None, interrupted.output
        resumed = ended(up(config_file, *RATE), 300, leftovers)
        repeated = ended(up(config_file), 60, leftovers)
    return Run(config_file, directory, second, interrupted, resumed, repeated, first.pid, saved.state.step)


def up(file: Path, *overrides: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "services.cli", "up", str(file), *overrides]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def ended(process: "subprocess.Popen[str]", timeout: float, leftovers: Leftovers | None = None) -> Ended:
    """Of one that does not end: what its threads are doing."""
    try:
        output = process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)
        # It prints its stacks, and nothing says when it has.
        time.sleep(1.0)
        kill(family(process.pid))
        pytest.fail(f"still running after {timeout} s:\n{process.communicate(timeout=10)[0]}")
    return Ended(process.returncode, output, [] if leftovers is None else leftovers.found())


def _until(process: "subprocess.Popen[str]", condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.1)
