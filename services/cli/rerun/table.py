"""The report of a rerun as a table."""

from rich.table import Table

from services.cli.shared.output import plain_table
from services.common.run_files.rerun_report import RerunReport


def rerun_table(report: RerunReport) -> Table:
    """One row per step metric: in how many steps it is equal, and where it is furthest off."""
    first, last = report.steps[0].step, report.steps[-1].step
    several = first != last
    title = f"Steps {first} to {last}, recorded against rerun" if several else f"Step {first}"
    step_column = ["step"] if several else []
    table = plain_table(title, "metric", "equal", "max |Δ|", "relative", *step_column, "recorded", "rerun")
    for name in report.names:
        pairs = report.pairs(name)
        step, worst = max(pairs, key=lambda each: each[1].absolute)
        relative = max(pair.relative for _, pair in pairs)
        equal = sum(pair.equal for _, pair in pairs)
        table.add_row(
            name,
            f"{equal}/{len(pairs)}" if several else ("yes" if equal else "no"),
            "0" if worst.absolute == 0 else f"{worst.absolute:.1e}",
            "0" if relative == 0 else f"{relative:.1e}",
            *([str(step)] if several else []),
            _number(worst.recorded),
            _number(worst.rerun),
            style=None if equal == len(pairs) else "yellow",
        )
    _add_states(table, report, several)
    return table


def _add_states(table: Table, report: RerunReport, several: bool) -> None:
    for name, found in (
        ("state before", [step.starts_alike for step in report.steps]),
        ("state after", [step.ends_alike for step in report.steps]),
    ):
        equal = sum(alike is True for alike in found)
        compared = all(alike is not None for alike in found)
        text = f"{equal}/{len(found)}" if several else ("yes" if equal else "no")
        blanks = [""] * (5 if several else 4)
        style = "bold" if not compared or equal == len(found) else "bold yellow"
        table.add_row(name, text if compared else "–", *blanks, style=style)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.5g}"
