from io import StringIO

from rich.console import Console

from services.cli.compare.curves import curve_table, plot_curves
from services.cli.up.report import damaged_lines, held_out_lines, plot, summary_table
from services.common.run_files.held_out import Best, write_best
from services.common.run_files.run_log import RunLog


def fill(run_log: RunLog) -> None:
    for step in (1, 2, 3):
        metrics = {"reward_mean": step / 10, "kl": 0.01 * step, "sampler_ratio_mean": 1.0, "grad_norm": 0.5}
        run_log.add_step({"step": step, "metrics": metrics})
    for step, accuracy in ((0, 0.25), (3, 0.75)):
        run_log.add_evaluation({"step": step, "metrics": {"greedy_accuracy": accuracy, "greedy_accuracy_error": 0.01}})


def test_before_against_after(tmp_path):
    run_log = RunLog(tmp_path)
    assert summary_table(run_log) is None
    fill(run_log)
    console = Console(file=StringIO(), width=120)
    console.print(summary_table(run_log))
    text = console.file.getvalue()
    assert "0.250 ± 0.010" in text
    assert "0.750 ± 0.010" in text
    assert "0.300" in text


def evaluated(tmp_path, *values):
    for step, value in enumerate(values):
        metrics = {"greedy_accuracy": value, "greedy_accuracy_error": 0.02}
        RunLog(tmp_path).add_evaluation({"step": 10 * step, "asks": "same", "metrics": metrics})


def keep(tmp_path, step, score):
    path = tmp_path / "checkpoints" / f"step-{step:06d}"
    path.mkdir(parents=True)
    write_best(path.parent, Best(step, "held-out accuracy", score, path))
    return path


def test_the_best_checkpoint_is_named(tmp_path):
    assert list(held_out_lines(tmp_path, 0.5)) == []
    evaluated(tmp_path, 0.5, 0.75, 0.7)
    path = keep(tmp_path, 10, 0.75)
    assert list(held_out_lines(tmp_path, 0.5)) == [f"best        {path} (held-out accuracy 0.750)"]


def test_a_run_that_ended_far_below_its_best_says_so(tmp_path):
    evaluated(tmp_path, 0.5, 0.75, 0.0)
    path = keep(tmp_path, 10, 0.75)
    assert list(held_out_lines(tmp_path, 0.5))[1] == (
        f"The run has ended far below its best: held-out accuracy 0.000 at step 20, 0.750 at step 10: {path}"
    )


def test_a_run_that_ended_far_below_its_start_says_so(tmp_path):
    evaluated(tmp_path, 0.75, 0.3, 0.0)
    keep(tmp_path, 10, 0.3)
    (line,) = held_out_lines(tmp_path, 0.5)
    assert line.endswith("0.750 at step 0: the model that the run began with")


def test_damaged_checkpoints_are_named(tmp_path):
    assert list(damaged_lines(tmp_path)) == []
    keep(tmp_path, 2, 0.5).rename(tmp_path / "checkpoints" / "damaged-step-000002")
    (line,) = damaged_lines(tmp_path)
    assert line.startswith(f"damaged     {tmp_path}/checkpoints/damaged-step-000002 ")


def test_the_plot_is_a_picture(tmp_path):
    run_log = RunLog(tmp_path)
    fill(run_log)
    plot(run_log, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_trained_again_replaces_what_came_after_the_resume(tmp_path):
    run_log = RunLog(tmp_path)
    fill(run_log)
    run_log.add_step({"step": 2, "metrics": {"reward_mean": 0.9}})
    assert [(entry["step"], entry["metrics"]["reward_mean"]) for entry in run_log.steps()] == [(1, 0.1), (2, 0.9)]


def test_sampler_and_trainer_are_compared_before_the_first_update(tmp_path):
    run_log = RunLog(tmp_path)
    fill(run_log)
    run_log.add_step({"step": 3, "metrics": {"sampler_ratio_mean": 1.5, "first_sampler_ratio_mean": 1.25}})
    run_log.add_step({"step": 4, "metrics": {"sampler_ratio_mean": 1.5, "first_sampler_ratio_mean": 1.125}})
    console = Console(file=StringIO(), width=120)
    console.print(summary_table(run_log))
    (row,) = [line for line in console.file.getvalue().splitlines() if "sampler/trainer ratio" in line]
    assert "1.125000" in row
    assert "1.5" not in row


def test_a_run_with_a_step_that_is_not_finite_has_its_table_and_its_picture(tmp_path):
    run_log = RunLog(tmp_path)
    fill(run_log)
    broken = dict.fromkeys(("reward_mean", "grad_norm", "kl", "mismatch_kl", "routing_agreement"), float("nan"))
    run_log.add_step({"step": 3, "metrics": {**broken, "loss": float("inf")}})
    run_log.add_evaluation(
        {"step": 3, "metrics": dict.fromkeys(("greedy_accuracy", "greedy_accuracy_error"), float("nan"))}
    )
    console = Console(file=StringIO(), width=120)
    console.print(summary_table(run_log))
    assert "nan" not in console.file.getvalue()
    assert "None" not in console.file.getvalue()
    plot(run_log, tmp_path / "plot.png")
    assert curve_table({"run": run_log}).row_count == 1
    plot_curves({"run": run_log}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
