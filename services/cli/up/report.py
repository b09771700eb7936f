"""The summary of a run: a table of before and after, and a picture."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from services.cli.shared.output import draw_scores, four_panels, series
from services.common.run_files.held_out import SCORES, best_score, comparable_scores, read_best
from services.common.run_files.run_log import STEPS_WITHOUT_SIGNAL, WARNED_AFTER_STEPS, RunLog, before_updates

Entry = dict[str, Any]

STEP_ROWS = (
    ("reward_mean", "reward", 3),
    ("preference_margin", "margin of the pairs", 3),
    ("sampler_ratio_mean", "sampler/trainer ratio, mean", 6),
    ("logprob_difference_max", "|Δ log-prob| sampler/trainer, max", 7),
    ("mismatch_kl", "KL sampler/trainer", 8),
    ("routing_agreement", "routing agreement before replay", 5),
    ("candidate_set_size", "candidates per token", 2),
    ("kl", "KL to the reference", 5),
    ("masked_fraction", "masked sequences", 3),
    ("entropy", "entropy over the candidates", 3),
    ("grad_norm", "gradient norm", 3),
    ("staleness_mean", "staleness, versions", 2),
)


def summary_table(run_log: RunLog) -> Table | None:
    """None before the first step. Each half names the steps that it compares: evaluations begin before the first one.

    Step metrics compare the first step, where the weights of sampler and trainer are equal, with the last.
    """
    steps, evaluations = _before_updates(run_log.steps()), run_log.evaluations()
    if not steps or not evaluations:
        return None
    table = Table(title="Before and after", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    first, last = evaluations[0], evaluations[-1]
    table.add_row("held out", f"step {first['step']}", f"step {last['step']}", style="dim")
    for name, label in SCORES.items():
        if name in first["metrics"] and name in last["metrics"]:
            table.add_row(label, _with_error(first["metrics"], name), _with_error(last["metrics"], name), style="bold")
    table.add_section()
    first, last = steps[0], steps[-1]
    table.add_row("training", f"step {first['step']}", f"step {last['step']}", style="dim")
    for name, label, digits in STEP_ROWS:
        if name in first["metrics"] and name in last["metrics"]:
            table.add_row(label, f"{first['metrics'][name]:.{digits}f}", f"{last['metrics'][name]:.{digits}f}")
    return table


def _before_updates(entries: Sequence[Entry]) -> list[Entry]:
    return [{**entry, "metrics": before_updates(entry["metrics"])} for entry in entries]


def held_out_lines(run: Path, share: float) -> Iterator[str]:
    """Which checkpoint did best on held-out data, and whether the run has ended far below it (trainer.collapse)."""
    scores = comparable_scores(RunLog(run).evaluations())
    best, kept = best_score(scores), read_best(run / "checkpoints")
    if best is None:
        return
    where = "the model that the run began with" if best.step == 0 else "no checkpoint of it is there"
    if kept is not None and (best.step > 0 or kept.score == best.value):
        yield f"best        {kept.path} ({kept.label} {kept.score:.3f})"
        where = str(kept.path)
    if scores[-1].fell(best, share):
        yield (
            f"The run has ended far below its best: {best.label} {scores[-1].value:.3f} at step {scores[-1].step}, "
            f"{best.value:.3f} at step {best.step}: {where}"
        )


def doubts(step: Mapping[str, float]) -> list[str]:
    """Doubts about the run from a step's metrics, in sentences."""
    without = step.get(STEPS_WITHOUT_SIGNAL, 0.0)
    if without < WARNED_AFTER_STEPS:
        return []
    return [
        f"nothing to learn in the last {without:.0f} steps: the answers to each prompt all had the same reward "
        "(docs/runbook.md#nothing-to-learn)"
    ]


def damaged_lines(run: Path) -> Iterator[str]:
    """Checkpoints that a start of the run has put aside."""
    for path in sorted((run / "checkpoints").glob("damaged-*")):
        yield f"damaged     {path} (put aside; an older checkpoint was taken)"


def plot(run_log: RunLog, path: Path) -> None:
    """Accuracy and reward, KL, sampler against trainer, and the gradient over the steps of the run."""
    steps, evaluations = _before_updates(run_log.steps()), run_log.evaluations()
    with four_panels(path) as panels:
        learning, drift, agreement, gradient = panels
        for name, label in SCORES.items():
            draw_scores(learning, evaluations, name, label=label, capsize=3)
        _line(learning, steps, "reward_mean", "training reward", alpha=0.5)
        _line(learning, steps, "preference_accuracy", "training pairs, preferred one ahead", alpha=0.5)
        learning.set(title="Learning", ylabel="share correct", ylim=(0, 1.02))
        _line(drift, steps, "kl", "KL to the reference")
        _line(drift, steps, "mismatch_kl", "KL sampler/trainer")
        drift.set(title="Drift", ylabel="nats per token")
        drift.set_yscale("symlog", linthresh=1e-4)
        _line(agreement, steps, "sampler_ratio_mean", "sampler/trainer ratio, mean")
        _line(agreement, steps, "routing_agreement", "routing agreement before replay")
        _line(agreement, steps, "masked_fraction", "masked sequences")
        agreement.set(title="Sampler against trainer")
        _line(gradient, steps, "grad_norm", "gradient norm")
        _line(gradient, steps, "entropy", "entropy, nats")
        gradient.set(title="Optimization", ylim=(0, None))
        for axis in panels:
            axis.set_xlabel("step")


def _line(axis: Any, entries: Sequence[Entry], name: str, label: str, **style: Any) -> None:
    at, values = series(entries, name)
    if at:
        axis.plot(at, values, label=label, **style)


def _with_error(metrics: dict[str, float], name: str) -> str:
    return f"{metrics[name]:.3f} ± {metrics[f'{name}_error']:.3f}"
