"""What is left of a run to look at: a table before against after, and a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from services.common.records import Records

Record = dict[str, Any]

HELD_OUT = (
    ("greedy_accuracy", "held-out accuracy, greedy"),
    ("sampled_accuracy", "held-out accuracy, sampled"),
    ("preference_accuracy", "held-out pairs, preferred one ahead"),
)
STEP_ROWS = (
    ("reward_mean", "reward", 3),
    ("preference_margin", "margin of the pairs", 3),
    ("sampler_ratio_mean", "sampler/trainer ratio, mean", 6),
    ("logprob_difference_max", "|Δ log-prob| sampler/trainer, max", 7),
    ("mismatch_kl", "KL sampler/trainer", 8),
    ("routing_agreement", "routing agreement before replay", 5),
    ("candidates_mean", "candidates per token", 2),
    ("kl", "KL to the reference", 5),
    ("masked_sequence_ratio", "masked sequences", 3),
    ("entropy", "entropy over the candidates", 3),
    ("grad_norm", "gradient norm", 3),
    ("staleness_mean", "staleness, versions", 2),
)


def summary_table(records: Records) -> Table | None:
    """None before the first step. Step metrics compare the first step, where the weights are equal, with the last."""
    steps, evaluations = records.steps(), records.evaluations()
    if not steps or not evaluations:
        return None
    table = Table(title="Before and after", title_justify="left")
    for column in ("", f"step {evaluations[0]['step']}", f"step {steps[-1]['step']}"):
        table.add_column(column, justify="right" if column else "left")
    for name, label in HELD_OUT:
        first, last = evaluations[0]["metrics"], evaluations[-1]["metrics"]
        if name in first and name in last:
            table.add_row(label, _with_error(first, name), _with_error(last, name), style="bold")
    for name, label, digits in STEP_ROWS:
        first, last = steps[0]["metrics"], steps[-1]["metrics"]
        if name in first and name in last:
            table.add_row(label, f"{first[name]:.{digits}f}", f"{last[name]:.{digits}f}")
    return table


def plot(records: Records, path: Path) -> None:
    """Accuracy and reward, KL, sampler against trainer, and the gradient over the steps of the run."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    steps, evaluations = records.steps(), records.evaluations()
    figure, grid = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    (learning, drift), (agreement, gradient) = grid
    for name, label in HELD_OUT:
        chosen = [record for record in evaluations if name in record["metrics"]]
        if chosen:
            learning.errorbar(
                [record["step"] for record in chosen],
                _values(chosen, name),
                [record["metrics"][f"{name}_error"] for record in chosen],
                marker="o",
                capsize=3,
                label=label,
            )
    _line(learning, steps, "reward_mean", "training reward", alpha=0.5)
    _line(learning, steps, "preference_accuracy", "training pairs, preferred one ahead", alpha=0.5)
    learning.set(title="Learning", ylabel="share correct", ylim=(0, 1.02))
    _line(drift, steps, "kl", "KL to the reference")
    _line(drift, steps, "mismatch_kl", "KL sampler/trainer")
    drift.set(title="Drift", ylabel="nats per token")
    drift.set_yscale("symlog", linthresh=1e-4)
    _line(agreement, steps, "sampler_ratio_mean", "sampler/trainer ratio, mean")
    _line(agreement, steps, "routing_agreement", "routing agreement before replay")
    _line(agreement, steps, "masked_sequence_ratio", "masked sequences")
    agreement.set(title="Sampler against trainer")
    _line(gradient, steps, "grad_norm", "gradient norm")
    _line(gradient, steps, "entropy", "entropy, nats")
    gradient.set(title="Optimization", ylim=(0, None))
    for axis in (learning, drift, agreement, gradient):
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _line(axis: Any, records: Sequence[Record], name: str, label: str, **style: Any) -> None:
    chosen = [record for record in records if name in record["metrics"]]
    if chosen:
        axis.plot([record["step"] for record in chosen], _values(chosen, name), label=label, **style)


def _values(records: Sequence[Record], name: str) -> list[float]:
    return [record["metrics"][name] for record in records]


def _with_error(metrics: dict[str, float], name: str) -> str:
    return f"{metrics[name]:.3f} ± {metrics[f'{name}_error']:.3f}"
