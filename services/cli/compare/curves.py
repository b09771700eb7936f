"""Learning curves of several runs in one picture, and a table."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from services.common.run_files.run_log import RunLog

Entry = dict[str, Any]

# A single step's reward is of few prompts: curves are the mean over so many steps, up to each.
SMOOTHED_STEPS = 5
LAST_STEPS = 10
HELD_OUT = (("greedy_accuracy", "held-out accuracy, greedy"), ("sampled_accuracy", "held-out accuracy, sampled"))


def curve_table(runs: Mapping[str, RunLog]) -> Table:
    """Held-out accuracy before and after, reward over the last steps, KL to the reference at the last one, medians.

    A run without a step has a row of dashes.
    """
    table = Table(title="The same start, data and seeds", title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("algorithm", no_wrap=True)
    for heading in ("steps", "greedy", "sampled", f"last {LAST_STEPS}", "KL", "grad", "s/step"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, run_log in runs.items():
        found = summarize_run(run_log)
        table.add_row(
            name,
            _number(found, "steps", 0),
            *(_accuracy(found, held_out) for held_out, _ in HELD_OUT),
            _number(found, "reward_last", 3),
            _number(found, "kl_last", 4),
            _number(found, "grad_norm_median", 3),
            _number(found, "step_seconds_median", 2),
        )
    return table


def summarize_run(run_log: RunLog) -> dict[str, float]:
    """What the table shows, as numbers; empty before the first step."""
    steps, evaluations = run_log.steps(), run_log.evaluations()
    if not steps:
        return {}
    found = {"steps": float(steps[-1]["step"])}
    for name, _ in HELD_OUT:
        for when, entry in (("before", evaluations[:1]), ("after", evaluations[-1:])):
            for suffix in ("", "_error"):
                if entry and f"{name}{suffix}" in entry[0]["metrics"]:
                    found[f"{name}_{when}{suffix}"] = entry[0]["metrics"][f"{name}{suffix}"]
    rewards, norms, seconds = (_series(steps, name)[1] for name in ("reward_mean", "grad_norm", "step_seconds"))
    if rewards:
        found["reward_last"] = statistics.fmean(rewards[-LAST_STEPS:])
    if norms:
        found["grad_norm_median"] = statistics.median(norms)
    if seconds:
        found["step_seconds_median"] = statistics.median(seconds)
    if "kl" in steps[-1]["metrics"]:
        found["kl_last"] = steps[-1]["metrics"]["kl"]
    found["steps_skipped"] = float(sum(not entry["metrics"].get("step_applied", 1.0) for entry in steps))
    return found


def plot_curves(runs: Mapping[str, RunLog], path: Path) -> None:
    """Reward, held-out accuracy and gradient norm over the steps, one colour an algorithm."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    (reward, gradient), held_out = grid
    for name, run_log in runs.items():
        steps, evaluations = run_log.steps(), run_log.evaluations()
        _curve(reward, steps, "reward_mean", name)
        _curve(gradient, steps, "grad_norm", name)
        for axis, (metric, _) in zip(held_out, HELD_OUT, strict=True):
            at, values = _series(evaluations, metric)
            errors = _series(evaluations, f"{metric}_error")[1]
            if at:
                axis.errorbar(at, values, errors if len(errors) == len(at) else None, marker="o", ms=3, label=name)
    reward.set(title=f"training reward, mean of {SMOOTHED_STEPS} steps", ylim=(0, 1.02))
    gradient.set(title=f"gradient norm before clipping, mean of {SMOOTHED_STEPS} steps", yscale="log")
    for axis, (_, title) in zip(held_out, HELD_OUT, strict=True):
        axis.set(title=f"{title}, ± standard error", ylim=(0, 1.02))
    for axis in grid.flat:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _curve(axis: Any, entries: Sequence[Entry], metric: str, label: str) -> None:
    steps, values = _series(entries, metric)
    if steps:
        smoothed = [statistics.fmean(values[max(0, end - SMOOTHED_STEPS) : end]) for end in range(1, len(values) + 1)]
        axis.plot(steps, smoothed, label=label)


def _series(entries: Sequence[Entry], metric: str) -> tuple[list[int], list[float]]:
    chosen = [entry for entry in entries if metric in entry["metrics"]]
    return [entry["step"] for entry in chosen], [entry["metrics"][metric] for entry in chosen]


def _number(found: Mapping[str, float], name: str, digits: int) -> str:
    return f"{found[name]:.{digits}f}" if name in found else "–"


def _accuracy(found: Mapping[str, float], name: str) -> str:
    before, after = (_number(found, f"{name}_{when}", 2) for when in ("before", "after"))
    error = found.get(f"{name}_after_error")
    return f"{before}→{after}" + (f" ±{error:.2f}" if error is not None else "")
