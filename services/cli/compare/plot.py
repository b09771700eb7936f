"""A comparison's report as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.cli.shared.output import four_panels
from services.common.run_files.compare_report import CompareReport

TERMS = (
    ("loss", "loss"),
    ("policy_loss", "policy"),
    ("kl_loss", "KL"),
    ("value_loss", "value"),
    ("entropy_loss", "entropy"),
)
SHARES = (("masked_fraction", "masked sequences"), ("clip_fraction", "clipped tokens"))
# Loss terms of a policy gradient are near 0, those of preferences near 1: linear below, logarithmic above.
LINEAR_BELOW = 1e-3


def plot_comparison(report: CompareReport, path: Path) -> None:
    """Gradient norms by step; means over the steps of loss terms, cosines, and what is masked or clipped."""
    with four_panels(path) as (terms, norms, cosines, shares):
        _bars(terms, report, TERMS)
        terms.set_yscale("symlog", linthresh=LINEAR_BELOW)
        terms.set_title("loss terms, coefficients included")
        for index, name in enumerate(report.algorithms):
            chosen = [step for step in report.steps if "grad_norm" in step.metrics[index]]
            found = [step.metrics[index]["grad_norm"] for step in chosen]
            norms.plot([step.step for step in chosen], found, marker="o", label=name)
        norms.set(title="gradient norm", xlabel="step", ylim=(0, None))
        _heatmap(cosines, report)
        _bars(shares, report, SHARES)
        shares.set(title="share dropped from the policy term", ylim=(0, None))


def _bars(axis: Any, report: CompareReport, metrics: Sequence[tuple[str, str]]) -> None:
    """A group of bars for each metric that an algorithm has, one bar for each algorithm that has it."""
    everyone = range(len(report.algorithms))
    metrics = [each for each in metrics if any(report.mean(each[0], index) is not None for index in everyone)]
    width = 0.8 / len(report.algorithms)
    for index, name in enumerate(report.algorithms):
        means = [report.mean(metric, index) for metric, _ in metrics]
        at = [place + (index - (len(report.algorithms) - 1) / 2) * width for place in range(len(metrics))]
        axis.bar(at, [mean or 0.0 for mean in means], width, label=name)
    axis.set_xticks(range(len(metrics)), [label for _, label in metrics])


def _heatmap(axis: Any, report: CompareReport) -> None:
    names = report.algorithms
    cosines = [[report.cosine(row, column) for column in range(len(names))] for row in range(len(names))]
    shown = [[float("nan") if cosine is None else cosine for cosine in row] for row in cosines]
    image = axis.imshow(shown, vmin=-1, vmax=1, cmap="RdBu")
    for row, found in enumerate(cosines):
        for column, cosine in enumerate(found):
            text = "–" if cosine is None else f"{cosine:.2f}"
            dark = cosine is not None and abs(cosine) > 0.6
            axis.text(column, row, text, ha="center", va="center", color="white" if dark else "black", fontsize=8)
    axis.set_xticks(range(len(names)), names, rotation=30)
    axis.set_yticks(range(len(names)), names)
    axis.set_title("cosine of the gradients")
    axis.figure.colorbar(image, ax=axis, shrink=0.8)
