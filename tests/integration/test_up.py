"""`trivet up` as a user runs it: two ranks under ZeRO-3, Ctrl-C on the way, resuming from the checkpoint."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from services.common.run_files.run_log import RunLog
from services.trainer.checkpoint.directory import Checkpoints

STEPS = 4
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture(scope="module")
def run(quickstart_model, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("up")
    tree = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    del tree["prepare"]
    tree["run"]["directory"] = str(directory / "runs")
    tree["model"]["path"] = str(quickstart_model)
    tree["data"]["train"]["path"] = str(quickstart_model / "train.jsonl")
    tree["data"]["validation"]["path"] = str(quickstart_model / "validation.jsonl")
    tree["sampling"]["group_size"] = 4
    tree["evaluation"] = {"every": 0, "prompts": 8, "samples": 2}
    tree["trainer"] |= {"steps": STEPS, "groups_per_step": 4, "processes": 2, "zero_stage": 3}
    (directory / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    return directory


def up(directory: Path, *overrides: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "services.cli", "up", str(directory / "run.yaml"), *overrides]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def rest_of(process: "subprocess.Popen[str]", timeout: float) -> str:
    """What it still prints until it ends; of one that does not end, what its threads are doing."""
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGUSR1)
        time.sleep(1.0)
        process.kill()
        pytest.fail(f"still running after {timeout} s:\n{process.communicate(timeout=10)[0]}")


def wait_for_step(directory: Path, step: int, process: "subprocess.Popen[str]") -> None:
    run_log = RunLog(directory / "runs" / "quickstart")
    deadline = time.monotonic() + 240
    while not any(entry["step"] >= step for entry in run_log.steps()):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, f"no step {step}"
        time.sleep(0.1)


@pytest.mark.timeout(600)
def test_ctrl_c_leaves_a_checkpoint_and_no_process_and_the_run_resumes(run, leftovers):
    rate = ("--set", "trainer.optimizer.learning_rate=3.0e-4")
    first = up(run, *rate)
    wait_for_step(run, 1, first)
    second = up(run)
    output = rest_of(second, 60)
    assert second.returncode == 1
    assert f"is in use by another `trivet up` (process {first.pid})" in output
    first.send_signal(signal.SIGINT)
    output = rest_of(first, 120)
    assert first.returncode == 130, output
    assert "finishing the step and writing a checkpoint, for 10 min at most" in output
    assert leftovers.found() == []
    stopped = Checkpoints(run / "runs" / "quickstart" / "checkpoints", keep=3).latest()
    assert 1 <= stopped.state.step <= STEPS
    last_lines = output.strip().splitlines()[-2:]
    assert last_lines[0].startswith(f"Stopped; the newest checkpoint holds step {stopped.state.step}: ")
    assert last_lines[1] == f"Resume with: trivet up {run / 'run.yaml'} {' '.join(rate)}"

    second = up(run, *rate)
    output = rest_of(second, 300)
    assert second.returncode == 0, output
    assert "Before and after" in output
    assert leftovers.found() == []
    entries = RunLog(run / "runs" / "quickstart").steps()
    assert [entry["step"] for entry in entries] == list(range(1, STEPS + 1))
    requests = [int(group.partition("-")[2]) for entry in entries for group in entry["groups"]]
    assert sorted(requests) == list(range(4 * STEPS))
    finished = Checkpoints(run / "runs" / "quickstart" / "checkpoints", keep=3).latest()
    assert finished.state.step == STEPS
    assert (run / "runs" / "quickstart" / "plot.png").stat().st_size > 10_000
    assert json.loads((finished.policy / "config.json").read_text())["model_type"] == "qwen3_moe"

    third = up(run)
    output = rest_of(third, 60)
    assert third.returncode == 0, output
    assert f"is finished: its checkpoint holds step {STEPS}" in output
    assert len(RunLog(run / "runs" / "quickstart").evaluations()) == 2


def test_a_wrong_configuration_is_refused_before_anything_starts(run):
    refused = up(run, "--set", "trainer.stepz=3")
    output = rest_of(refused, 60)
    assert refused.returncode == 2
    assert "trainer.stepz is not a known key" in output


def test_an_unknown_scorer_is_refused_before_anything_starts(run, leftovers):
    refused = up(run, "--set", "reward.scorers=[{name: oracle}]", "--set", "run.name=other")
    output = rest_of(refused, 120)
    assert refused.returncode == 2
    assert not (run / "runs" / "other").exists()
    (line,) = [line for line in output.splitlines() if "oracle" in line]
    assert line.startswith("✗ reward.scorers: ")
    assert "exact_match" in line
    assert leftovers.found() == []


def test_preferences_need_the_trainer_alone(run, quickstart_model):
    tree = yaml.safe_load((QUICKSTART.parent / "quickstart-dpo.yaml").read_text(encoding="utf-8"))
    del tree["prepare"]
    tree["run"] = {"name": "pairs", "directory": str(run / "runs")}
    tree["model"]["path"] = str(quickstart_model)
    tree["data"]["preferences"]["path"] = str(quickstart_model / "preferences.jsonl")
    tree["evaluation"] = {"every": 0, "prompts": 16}
    tree["trainer"] |= {"steps": 6, "groups_per_step": 16, "checkpoint_every": 3}
    (run / "pairs.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    command = [sys.executable, "-m", "services.cli", "up", str(run / "pairs.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stdout
    assert [log.name for log in (run / "runs" / "pairs" / "logs").iterdir()] == ["trainer.log"]
    run_log = RunLog(run / "runs" / "pairs")
    before, after = (entry["metrics"] for entry in run_log.evaluations())
    assert before["preference_accuracy"] == 0.5
    assert after["preference_loss"] < before["preference_loss"]
    assert [entry["metrics"]["preference_pairs"] for entry in run_log.steps()] == [16] * 6
    assert len({sample for entry in run_log.steps() for sample in entry["samples"]}) == 6 * 32
    assert Checkpoints(run / "runs" / "pairs" / "checkpoints", keep=3).latest().state.ledger == {"cursor": 96}
