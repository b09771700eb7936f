"""Bytes of one sample by part, as a picture."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.sizing.case import Case

PARTS = (("routing", "#c44e52"), ("candidates", "#4c72b0"), ("stream entry", "#55a868"))


def plot(cases: Sequence[Case], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 2.6), layout="constrained")
    names = [case.model.name for case in reversed(cases)]
    left = [0.0] * len(cases)
    for part, colour in PARTS:
        values = [
            {"routing": case.sample.routing, "candidates": case.sample.candidates, "stream entry": case.sample.entry}[
                part
            ]
            / 1e6
            for case in reversed(cases)
        ]
        axes.barh(names, values, left=left, color=colour, label=part)
        left = [before + value for before, value in zip(left, values, strict=True)]
    for name, total in zip(names, left, strict=True):
        axes.text(total, name, f" {total:.2f} MB", va="center")
    axes.set_xlim(0, 1.15 * max(left))
    axes.set_xlabel(f"MB of one sample of {cases[0].work.length} tokens, as stored")
    axes.legend(loc="upper right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
