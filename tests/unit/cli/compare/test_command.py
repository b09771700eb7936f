import io
import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from services.cli.app import app
from services.cli.compare import command
from services.cli.compare.algorithm_runs import plan_runs
from services.cli.compare.curves import curve_table, plot_curves, summarize_run
from services.cli.compare.plot import plot_comparison
from services.cli.compare.table import compare_tables
from services.common.config import ConfigError
from services.common.run_files.compare_report import ComparedStep, CompareReport
from services.common.run_files.run_log import RunLog

TREE = {
    "run": {"name": "base", "seed": 3},
    "model": {"path": "models/none", "max_length": 2048},
    "data": {"train": {"kind": "jsonl", "path": "none.jsonl"}},
    "reward": {"scorers": [{"name": "exact_match"}]},
    "algorithm": {"name": "grpo", "clip_high": 0.28},
}


@pytest.fixture
def config_file(tmp_path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**TREE, "run": {**TREE["run"], "directory": str(tmp_path / "runs")}}))
    return file


def write_records(path: Path, steps: int, reward: float) -> None:
    run_log = RunLog(path)
    for step in range(1, steps + 1):
        metrics = {"reward_mean": reward + step / 100, "grad_norm": 0.5, "step_applied": float(step > 1), "kl": 0.01}
        run_log.add_step({"step": step, "metrics": metrics | {"step_seconds": 2.0}})
    for step in (0, steps):
        metrics = {"greedy_accuracy": step / 40, "greedy_accuracy_error": 0.02, "sampled_accuracy": step / 80}
        run_log.add_evaluation({"step": step, "metrics": metrics})


def test_each_algorithm_is_a_run_of_its_own_from_the_same_start(config_file):
    runs = plan_runs(
        config_file, ["grpo", "dr_grpo", "gspo"], ["trainer.steps=7"], ["gspo:trainer.optimizer.learning_rate=1e-3"]
    )
    assert [run.path.name for run in runs] == ["base-grpo", "base-dr-grpo", "base-gspo"]
    assert [run.config.algorithm.clip_high for run in runs] == [0.28, None, None]
    assert [run.config.trainer.optimizer.learning_rate for run in runs] == [1e-6, 1e-6, 1e-3]
    same = [
        run.config.model_copy(update={"run": None, "algorithm": None, "trainer": run.config.trainer.steps})
        for run in runs
    ]
    assert same[0] == same[1] == same[2]
    assert {run.config.run.seed for run in runs} == {3}


def test_a_setting_that_one_of_them_refuses_is_reported_before_any_trains(config_file, monkeypatch):
    monkeypatch.setattr(command, "train", lambda *_: pytest.fail("nothing may train"))
    result = CliRunner().invoke(
        app, ["compare", "--algorithms", "grpo,gspo", "--train", str(config_file), "--set-for", "gspo:trainer.steps=0"]
    )
    assert result.exit_code == 2
    assert "trainer.steps" in result.output


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["--algorithms", "grpo"], "neither is given"),
        (["--algorithms", "grpo", "--train", "a.yaml", "runs/a"], "both are given"),
        (["--algorithms", "grpo,grpo", "runs/a"], "expected different names"),
        (["--algorithms", ",", "runs/a"], "expected different names"),
    ],
)
def test_wrong_usage_is_reported(arguments, reported):
    result = CliRunner().invoke(app, ["compare", *arguments])
    assert result.exit_code == 2
    assert reported in result.output


def test_a_training_that_fails_does_not_end_the_others(config_file, tmp_path, monkeypatch):
    trained = []

    def train(_, run, fresh):
        trained.append((run.algorithm, fresh))
        if run.algorithm == "gspo":
            return 1
        write_records(run.path, 20, 0.3)
        return 0

    monkeypatch.setattr(command, "train", train)
    output = tmp_path / "curves.png"
    arguments = ["--algorithms", "gspo,grpo,dapo", "--train", str(config_file), "--fresh", "--output", str(output)]
    result = CliRunner().invoke(app, ["compare", *arguments])
    assert trained == [("gspo", True), ("grpo", True), ("dapo", True)]
    assert result.exit_code == 1
    assert "the training with gspo ended with status 1" in result.output
    numbers = json.loads(output.with_suffix(".json").read_text())
    assert (numbers["gspo"]["status"], numbers["dapo"]["greedy_accuracy_after"]) == (1, 0.5)
    assert output.stat().st_size > 10_000


def test_an_interrupt_ends_the_series(config_file, tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr(command, "train", lambda _, run, __: trained.append(run.algorithm) or 130)
    result = CliRunner().invoke(app, ["compare", "--algorithms", "grpo,gspo", "--train", str(config_file)])
    assert result.exit_code == 130
    assert trained == ["grpo"]


def test_what_a_run_came_to(tmp_path):
    write_records(tmp_path, 20, 0.3)
    found = summarize_run(RunLog(tmp_path))
    assert found["reward_last"] == pytest.approx(0.3 + sum(range(11, 21)) / 1000)
    assert (found["steps"], found["steps_skipped"], found["step_seconds_median"]) == (20, 1, 2.0)
    assert (found["greedy_accuracy_before"], found["greedy_accuracy_after"]) == (0.0, 0.5)
    assert summarize_run(RunLog(tmp_path / "none")) == {}
    console = Console(file=io.StringIO(), width=80)
    console.print(curve_table({"grpo": RunLog(tmp_path), "dr_grpo": RunLog(tmp_path / "none")}))
    assert "0.00→0.50 ±0.02" in console.file.getvalue()
    assert "…" not in console.file.getvalue()
    plot_curves({"grpo": RunLog(tmp_path), "dr_grpo": RunLog(tmp_path / "none")}, tmp_path / "a.png")


def comparison() -> CompareReport:
    metrics = {"loss": -0.002, "policy_loss": -0.002, "kl_loss": 0.0, "grad_norm": 0.5, "clip_fraction": 0.1}
    step = ComparedStep(
        step=4,
        samples=8,
        metrics=(metrics, {**metrics, "grad_norm": 1.5}, {"loss": 0.7, "preference_margin": 0.01}),
        cosines=((1.0, 0.25, None), (0.25, 1.0, None), (None, None, None)),
    )
    other = step.model_copy(update={"step": 9, "cosines": ((1.0, 0.75, None), (0.75, 1.0, None), (None, None, None))})
    names = ("grpo", "gspo", "dpo")
    return CompareReport(run="base", algorithms=names, overrides=((), (), ()), steps=(step, other))


def test_a_comparison_is_shown_as_means_over_the_steps(tmp_path):
    console = Console(file=io.StringIO(), width=80)
    for table in compare_tables(comparison()):
        console.print(table)
    text = console.file.getvalue()
    lines = [line.split() for line in text.splitlines()]
    assert "mean over 2 steps, 4 to 9" in text
    assert ["gradient", "norm", "0.5", "1.5", "–"] in lines
    assert ["margin", "–", "–", "0.01"] in lines
    assert ["gspo", "0.500", "1.000", "–"] in lines
    assert not any(line[:2] == ["value", "term"] for line in lines)
    plot_comparison(comparison(), tmp_path / "compare.png")
    assert (tmp_path / "compare.png").stat().st_size > 10_000


def test_plans_refuse_an_override_for_one_that_is_not_compared(config_file):
    with pytest.raises(ConfigError, match="cispo is not among the algorithms"):
        plan_runs(config_file, ["grpo"], [], ["cispo:algorithm.clip_low=0.5"])
