"""Recorded steps of a real run, run again: on the ranks that recorded them, and on others."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from services.common.run_files.compare_report import CompareReport
from services.common.run_files.recorded_steps import recorded_steps
from services.common.run_files.rerun_report import RerunReport

STEPS = 3
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def trivet(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "services.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def run(quickstart_model, tmp_path_factory) -> Path:
    """Two ranks under ZeRO-3, all four mechanisms on, parameters sharded as small as they are."""
    directory = tmp_path_factory.mktemp("recorded")
    tree = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    del tree["prepare"]
    tree["run"]["directory"] = str(directory / "runs")
    tree["model"]["path"] = str(quickstart_model)
    tree["data"]["train"]["path"] = str(quickstart_model / "train.jsonl")
    tree["data"]["validation"]["path"] = str(quickstart_model / "validation.jsonl")
    # The model is hardly warmed up: whether its last digit is even varies, whether it is right hardly ever.
    tree["reward"] = {"scorers": [{"name": "regex", "options": {"pattern": "[02468]$"}}]}
    tree["evaluation"] = {"every": 0, "prompts": 4, "samples": 2}
    tree["trainer"] |= {
        "steps": STEPS,
        "groups_per_step": 8,
        "processes": 2,
        "zero_stage": 3,
        "recording": {"every": 1},
        "deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
    }
    (directory / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    ended = trivet("up", str(directory / "run.yaml"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return directory / "runs" / "quickstart"


def test_all_steps_are_there_and_nothing_half_written(run):
    steps = recorded_steps(run)
    assert [(step.record.step, step.record.steps_applied) for step in steps] == [(1, 0), (2, 1), (3, 2)]
    assert len(list((run / "recorded").iterdir())) == STEPS
    recorded = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    for step, line in zip(steps, recorded, strict=True):
        # Recording is no part of what a step costs.
        assert line["metrics"]["recording_seconds"] > 0
        assert float.fromhex(step.record.values["loss"]) == line["metrics"]["loss"]


def test_a_later_step_comes_out_again_bit_for_bit_in_fresh_processes(run):
    ended = trivet("rerun", str(run), "2", "--through", str(STEPS))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = RerunReport.model_validate_json((run / "rerun.json").read_bytes())
    assert (report.start, report.world_size, report.zero_stage) == ("engine", 2, 3)
    assert [step.step for step in report.steps] == list(range(2, STEPS + 1))
    for step in report.steps:
        assert (step.starts_alike, step.ends_alike) == (True, True)
        assert len(step.values) > 10
        assert all(pair.equal for pair in step.values)


def test_one_rank_under_zero_1_ends_with_the_same_losses_as_two_under_zero_3(run):
    changed = ["--set", "trainer.processes=1", "--set", "trainer.zero_stage=1", "--tolerance", "1e-4"]
    ended = trivet("rerun", str(run), "1", "--through", str(STEPS), *changed)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = RerunReport.model_validate_json((run / "rerun.json").read_bytes())
    assert (report.start, report.world_size, report.zero_stage) == ("policy", 1, 1)
    assert max(pair.absolute for _, pair in report.pairs("loss")) < 1e-5
    assert {step.ends_alike for step in report.steps} == {None}


def test_optimizer_state_goes_to_fewer_ranks(run):
    ended = trivet("rerun", str(run), "2", "--set", "trainer.processes=1", "--tolerance", "1e-4")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = RerunReport.model_validate_json((run / "rerun.json").read_bytes())
    assert (report.start, report.world_size, report.zero_stage) == ("engine", 1, 3)


def test_algorithms_share_the_recorded_batch(run):
    ended = trivet("compare", "--algorithms", "grpo,ppo,dpo", str(run), "2")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = CompareReport.model_validate_json((run / "compare.json").read_bytes())
    recorded = float.fromhex(recorded_steps(run)[1].record.values["grad_norm"])
    assert recorded > 1e-3
    assert report.steps[0].values[0]["grad_norm"] == pytest.approx(recorded, rel=1e-4)
    assert (run / "compare.png").stat().st_size > 10_000
