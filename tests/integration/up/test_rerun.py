"""Recorded steps of a real run, run again: on the ranks that recorded them, and on others."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.run_files.compare_report import CompareReport
from services.common.run_files.recorded_steps import recorded_steps
from services.common.run_files.rerun_report import RerunReport
from tests.support.runs.interrupted_run import STEPS, Run

pytestmark = pytest.mark.timeout(600)


def trivet(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "services.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def directory(run: Run) -> Path:
    assert run.resumed.status == 0, run.resumed.output
    return run.directory


def test_all_steps_are_there_and_nothing_half_written(directory):
    steps = recorded_steps(directory)
    assert [(step.record.step, step.record.steps_applied) for step in steps] == [
        (step, step - 1) for step in range(1, STEPS + 1)
    ]
    assert len(list((directory / "recorded").iterdir())) == STEPS
    recorded = [json.loads(line) for line in (directory / "steps.jsonl").read_text().splitlines()]
    for step, line in zip(steps, recorded, strict=True):
        # Recording is no part of what a step costs.
        assert line["metrics"]["recording_seconds"] > 0
        assert float.fromhex(step.record.metrics["loss"]) == line["metrics"]["loss"]


def test_a_later_step_comes_out_again_bit_for_bit_in_fresh_processes(directory):
    ended = trivet("rerun", str(directory), "2", "--through", str(STEPS))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = RerunReport.model_validate_json((directory / "rerun.json").read_bytes())
    assert (report.start, report.world_size, report.zero_stage) == ("engine", 2, 3)
    assert [step.step for step in report.steps] == list(range(2, STEPS + 1))
    for step in report.steps:
        assert (step.starts_alike, step.ends_alike) == (True, True)
        assert len(step.metrics) > 10
        assert all(pair.equal for pair in step.metrics)


def test_one_rank_under_zero_1_ends_with_the_same_losses_as_two_under_zero_3(directory):
    changed = ["--set", "trainer.processes=1", "--set", "trainer.zero_stage=1", "--tolerance", "1e-4"]
    ended = trivet("rerun", str(directory), "1", "--through", str(STEPS), *changed)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = RerunReport.model_validate_json((directory / "rerun.json").read_bytes())
    assert (report.start, report.world_size, report.zero_stage) == ("policy", 1, 1)
    assert max(pair.absolute for _, pair in report.pairs("loss")) < 1e-5
    assert {step.ends_alike for step in report.steps} == {None}


def test_optimizer_state_goes_to_fewer_ranks(directory):
    ended = trivet("rerun", str(directory), "2", "--set", "trainer.processes=1", "--tolerance", "1e-4")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = RerunReport.model_validate_json((directory / "rerun.json").read_bytes())
    assert (report.start, report.world_size, report.zero_stage) == ("engine", 1, 3)


def test_algorithms_share_the_recorded_batch(directory):
    ended = trivet("compare", "--algorithms", "grpo,ppo,dpo", str(directory), "2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = CompareReport.model_validate_json((directory / "compare.json").read_bytes())
    recorded = float.fromhex(recorded_steps(directory)[1].record.metrics["grad_norm"])
    assert recorded > 1e-3
    assert report.steps[0].metrics[0]["grad_norm"] == pytest.approx(recorded, rel=1e-4)
    assert (directory / "compare.png").stat().st_size > 10_000
