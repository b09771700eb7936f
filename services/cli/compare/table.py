"""A comparison's report as tables."""

from collections.abc import Iterator

from rich.table import Table

from services.cli.shared.output import plain_table
from services.common.run_files.compare_report import CompareReport

# The other step metrics are in the JSON.
ROWS = (
    ("loss", "loss"),
    ("policy_loss", "policy term"),
    ("kl_loss", "KL term"),
    ("value_loss", "value term"),
    ("entropy_loss", "entropy term"),
    ("grad_norm", "gradient norm"),
    ("masked_fraction", "masked"),
    ("truncated_fraction", "cut off"),
    ("clip_fraction", "clipped"),
    ("importance_weight", "weight"),
    ("preference_pairs", "pairs"),
    ("preference_accuracy", "in order"),
    ("preference_margin", "margin"),
)


def compare_tables(report: CompareReport) -> Iterator[Table]:
    """Means over the steps, and the mean cosine of each two gradients."""
    steps = [str(step.step) for step in report.steps]
    which = f"step {steps[0]}" if len(steps) == 1 else f"mean over {len(steps)} steps, {steps[0]} to {steps[-1]}"
    yield _metrics(report, f"The same batches, {which}")
    yield _cosines(report)


def _metrics(report: CompareReport, title: str) -> Table:
    table = plain_table(title, "", *report.algorithms)
    for name, label in ROWS:
        means = [report.mean(name, index) for index in range(len(report.algorithms))]
        if any(mean is not None for mean in means):
            table.add_row(label, *("–" if mean is None else f"{mean:.3g}" for mean in means))
    return table


def _cosines(report: CompareReport) -> Table:
    table = plain_table("Cosine of the gradients", "", *report.algorithms)
    for row, name in enumerate(report.algorithms):
        cosines = [report.cosine(row, column) for column in range(len(report.algorithms))]
        table.add_row(name, *("–" if cosine is None else f"{cosine:.3f}" for cosine in cosines))
    return table
