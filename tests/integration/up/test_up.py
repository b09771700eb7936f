"""`trivet up` as a user runs it: Ctrl-C on the way, resuming from the checkpoint, what it refuses, pairs of a file."""

import json

import pytest
import yaml

from services.common.run_files.run_log import RunLog
from services.trainer.checkpoint.directory import Checkpoints
from tests.support.runs.interrupted_run import GROUPS, RATE, STEPS, ended, up
from tests.support.runs.quickstart_run import quickstart_tree

# The first test that asks for the run waits for all of it.
pytestmark = pytest.mark.timeout(600)


def test_a_run_in_use_is_refused(run):
    assert run.second.status == 1
    assert f"is in use by another `trivet up` (process {run.first_process})" in run.second.output


def test_ctrl_c_leaves_a_checkpoint_and_no_process(run):
    assert run.interrupted.status == 130, run.interrupted.output
    assert "finishing the step and writing a checkpoint, for 10 min at most" in run.interrupted.output
    assert run.interrupted.left == []
    assert 1 <= run.stopped_at <= STEPS
    newest, resume = run.interrupted.output.strip().splitlines()[-2:]
    assert newest.startswith(f"Stopped; the newest checkpoint holds step {run.stopped_at}: ")
    assert resume == f"Resume with: trivet up {run.file} {' '.join(RATE)}"


def test_the_run_resumes_and_every_group_is_trained_once(run):
    assert run.resumed.status == 0, run.resumed.output
    assert "Before and after" in run.resumed.output
    assert run.resumed.left == []
    entries = RunLog(run.directory).steps()
    assert [entry["step"] for entry in entries] == list(range(1, STEPS + 1))
    requests = [int(group.partition("-")[2]) for entry in entries for group in entry["groups"]]
    assert sorted(requests) == list(range(GROUPS * STEPS))
    finished = Checkpoints(run.directory / "checkpoints", keep=3).latest()
    assert finished.state.step == STEPS
    assert (run.directory / "plot.png").stat().st_size > 10_000
    assert json.loads((finished.policy / "config.json").read_text())["model_type"] == "qwen3_moe"


def test_a_finished_run_does_not_start_again(run):
    assert run.repeated.status == 0, run.repeated.output
    assert f"is finished: its checkpoint holds step {STEPS}" in run.repeated.output
    assert run.repeated.left == []
    # Each start evaluates the weights that it starts with; this one did not start.
    assert {each["step"] for each in RunLog(run.directory).evaluations()} == {0, run.stopped_at, STEPS}


def test_a_wrong_configuration_is_refused_before_anything_starts(config_file):
    refused = ended(up(config_file, "--set", "trainer.stepz=3"), 60)
    assert refused.status == 2
    assert "trainer.stepz is not a known key" in refused.output


def test_an_unknown_scorer_is_refused_before_anything_starts(config_file, leftovers):
    unknown = ("--set", "reward.scorers=[{name: oracle}]", "--set", "run.name=other")
    refused = ended(up(config_file, *unknown), 120, leftovers)
    assert refused.status == 2
    assert not (config_file.parent / "runs" / "other").exists()
    (line,) = [line for line in refused.output.splitlines() if "oracle" in line]
    assert line.startswith("✗ reward.scorers: ")
    assert "exact_match" in line
    assert refused.left == []


def test_preferences_need_the_trainer_alone(quickstart_model, tmp_path):
    tree = quickstart_tree(quickstart_model, "quickstart-dpo")
    tree["run"] = {"name": "pairs", "directory": str(tmp_path / "runs")}
    tree["evaluation"] = {"every": 0, "prompts": 16}
    tree["trainer"] |= {"steps": 6, "groups_per_step": 16, "checkpoint_every": 3}
    (tmp_path / "pairs.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    finished = ended(up(tmp_path / "pairs.yaml"), 240)
    assert finished.status == 0, finished.output
    run = tmp_path / "runs" / "pairs"
    assert [log.name for log in (run / "logs").iterdir()] == ["trainer.log"]
    run_log = RunLog(run)
    before, after = (entry["metrics"] for entry in run_log.evaluations())
    assert before["preference_accuracy"] == 0.5
    assert after["preference_loss"] < before["preference_loss"]
    assert [entry["metrics"]["preference_pairs"] for entry in run_log.steps()] == [16] * 6
    assert len({sample for entry in run_log.steps() for sample in entry["samples"]}) == 6 * 32
    assert Checkpoints(run / "checkpoints", keep=3).latest().state.ledger == {"cursor": 96}
