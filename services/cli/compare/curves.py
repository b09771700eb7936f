"""Learning curves of several runs in one picture, and a table."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from services.cli.shared.output import draw_scores, four_panels, plain_table, series
from services.common.run_files.held_out import SCORES
from services.common.run_files.run_log import RunLog

Entry = dict[str, Any]

# A single step's reward is of few prompts: curves are the mean over so many steps, up to each.
SMOOTHED_STEPS = 5
LAST_STEPS = 10
HELD_OUT = ("greedy_accuracy", "sampled_accuracy")


def curve_table(runs: Mapping[str, RunLog]) -> Table:
    """Held-out accuracy before and after, reward over the last steps, KL to the reference at the last one, medians.

    A run without a step has a row of dashes.
    """
    headings = ("algorithm", "steps", "greedy", "sampled", f"last {LAST_STEPS}", "KL", "grad", "s/step")
    table = plain_table("The same start, data and seeds", *headings)
    for name, run_log in runs.items():
        found = summarize_run(run_log)
        table.add_row(
            name,
            _number(found, "steps", 0),
            *(_accuracy(found, held_out) for held_out in HELD_OUT),
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
    for name in HELD_OUT:
        for when, entry in (("before", evaluations[:1]), ("after", evaluations[-1:])):
            for suffix in ("", "_error"):
                if entry and f"{name}{suffix}" in entry[0]["metrics"]:
                    found[f"{name}_{when}{suffix}"] = entry[0]["metrics"][f"{name}{suffix}"]
    rewards, norms, seconds = (series(steps, name)[1] for name in ("reward_mean", "grad_norm", "step_seconds"))
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
    with four_panels(path) as (reward, gradient, *held_out):
        for name, run_log in runs.items():
            steps, evaluations = run_log.steps(), run_log.evaluations()
            _curve(reward, steps, "reward_mean", name)
            _curve(gradient, steps, "grad_norm", name)
            for axis, metric in zip(held_out, HELD_OUT, strict=True):
                draw_scores(axis, evaluations, metric, label=name, ms=3)
        reward.set(title=f"training reward, mean of {SMOOTHED_STEPS} steps", xlabel="step", ylim=(0, 1.02))
        gradient.set(
            title=f"gradient norm before clipping, mean of {SMOOTHED_STEPS} steps", xlabel="step", yscale="log"
        )
        for axis, metric in zip(held_out, HELD_OUT, strict=True):
            axis.set(title=f"{SCORES[metric]}, ± standard error", xlabel="step", ylim=(0, 1.02))


def _curve(axis: Any, entries: Sequence[Entry], metric: str, label: str) -> None:
    steps, values = series(entries, metric)
    if steps:
        smoothed = [statistics.fmean(values[max(0, end - SMOOTHED_STEPS) : end]) for end in range(1, len(values) + 1)]
        axis.plot(steps, smoothed, label=label)


def _number(found: Mapping[str, float], name: str, digits: int) -> str:
    return f"{found[name]:.{digits}f}" if name in found else "–"


def _accuracy(found: Mapping[str, float], name: str) -> str:
    before, after = (_number(found, f"{name}_{when}", 2) for when in ("before", "after"))
    error = found.get(f"{name}_after_error")
    return f"{before}→{after}" + (f" ±{error:.2f}" if error is not None else "")
