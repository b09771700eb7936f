"""How commands print and draw: lines, verdicts, tables, and the four panels of a picture."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from services.cli.shared.console import PlainConsole
from services.common.exit_codes import FAILED, FINISHED


def plain_console() -> Console:
    return PlainConsole()


def say(console: Console, text: str, style: str | None = None) -> None:
    """One line, however long."""
    console.print(text, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)


def say_verdict(console: Console, failures: Sequence[str], success: str) -> int:
    """A line for each failure, else one of success; returns the exit status."""
    for sentence in failures:
        say(console, f"✗ {sentence}", style="red")
    if not failures:
        say(console, f"✓ {success}", style="green")
    return FAILED if failures else FINISHED


def plain_table(title: str, *headings: str) -> Table:
    """Left-aligned in its first column, right-aligned in the others; without headings, columns come with the rows."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, min_width=60)
    table.show_header = bool(headings)
    for heading in headings[:1]:
        table.add_column(heading, no_wrap=True)
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


@contextmanager
def four_panels(path: Path) -> Iterator[Sequence[Any]]:
    """The axes, row by row, of a picture that is at `path` afterwards."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    try:
        yield list(grid.flat)
        for axis in grid.flat:
            if not axis.images:
                axis.grid(alpha=0.3)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    finally:
        plt.close(figure)


def draw_scores(axis: Any, evaluations: Sequence[Mapping[str, Any]], metric: str, **style: Any) -> None:
    """Held-out scores with their standard errors, where every one has its own."""
    steps, values = series(evaluations, metric)
    errors = series(evaluations, f"{metric}_error")[1]
    if steps:
        axis.errorbar(steps, values, errors if len(errors) == len(steps) else None, marker="o", **style)


def series(entries: Sequence[Mapping[str, Any]], metric: str) -> tuple[list[int], list[float]]:
    """Steps, and values of the metric, of those entries of a run's log that have it."""
    chosen = [entry for entry in entries if metric in entry["metrics"]]
    return [entry["step"] for entry in chosen], [entry["metrics"][metric] for entry in chosen]
