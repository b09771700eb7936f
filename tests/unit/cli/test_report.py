from io import StringIO

from rich.console import Console

from services.cli.report import plot, summary_table
from services.common.records import Records


def fill(records: Records) -> None:
    for step in (1, 2, 3):
        metrics = {"reward_mean": step / 10, "kl": 0.01 * step, "sampler_ratio_mean": 1.0, "grad_norm": 0.5}
        records.add_step({"step": step, "metrics": metrics})
    for step, accuracy in ((0, 0.25), (3, 0.75)):
        records.add_evaluation({"step": step, "metrics": {"greedy_accuracy": accuracy, "greedy_accuracy_error": 0.01}})


def test_before_against_after(tmp_path):
    records = Records(tmp_path)
    assert summary_table(records) is None
    fill(records)
    console = Console(file=StringIO(), width=120)
    console.print(summary_table(records))
    text = console.file.getvalue()
    assert "0.250 ± 0.010" in text
    assert "0.750 ± 0.010" in text
    assert "0.300" in text


def test_the_plot_is_a_picture(tmp_path):
    records = Records(tmp_path)
    fill(records)
    plot(records, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_trained_again_replaces_what_came_after_the_resume(tmp_path):
    records = Records(tmp_path)
    fill(records)
    records.add_step({"step": 2, "metrics": {"reward_mean": 0.9}})
    assert [(record["step"], record["metrics"]["reward_mean"]) for record in records.steps()] == [(1, 0.1), (2, 0.9)]
