"""An audit's report as tables."""

from collections.abc import Iterator

from rich.table import Table

from services.cli.shared.output import plain_table
from services.common.run_files.audit_report import AuditReport, CandidateFacts, Mismatch, ReplayKind


def tables(report: AuditReport) -> Iterator[Table]:
    yield _mismatch(report)
    if report.rows[0].agreement:
        yield _agreement(report)
    if report.candidates is not None:
        yield _candidates(report.candidates)


def _mismatch(report: AuditReport) -> Table:
    """The row that the run trains with is bold, and marked for readers without colours."""
    levels = list(report.rows[0].difference_quantiles)
    sizes = ["|Δ| mean", *(f"{float(level):.0%}" for level in levels), "max"]
    table = plain_table(f"Sampler against trainer, {report.tokens} tokens", "replay", *sizes, "ratio", "KL (k3)")
    for row in report.rows:
        is_configured = set(row.replayed) == set(report.configured)
        table.add_row(
            label(row, report) + (" ◀" if is_configured else ""),
            _small(row.difference_mean),
            *(_small(row.difference_quantiles[level]) for level in levels),
            _small(row.difference_max),
            f"{row.ratio_mean:.5f}",
            _small(row.mismatch_kl),
            style="bold" if is_configured else None,
        )
    return table


def label(row: Mismatch, report: AuditReport) -> str:
    kinds = report.rows[0].replayed
    missing = [kind for kind in kinds if kind not in row.replayed]
    if len(missing) == 1:
        return f"no {missing[0]}"
    if missing:
        return "neither"
    return "both" if len(kinds) == 2 else (*kinds, "nothing to replay")[0]


def _agreement(report: AuditReport) -> Table:
    """With replay a layer sees what the sampler's choice in the layers below it gave, without it its own."""
    columns = [row for row in (_with(report, "routing"), _without(report, "routing")) if row is not None]
    headings = ["with replay" if "routing" in row.replayed else "no routing" for row in columns]
    table = plain_table("Routing agreement, live choice against the sampler's", "MoE layer", *headings)
    for layer, shares in enumerate(zip(*(row.agreement for row in columns), strict=True)):
        table.add_row(str(layer), *(f"{share:.3%}" for share in shares))
    return table


def _candidates(facts: CandidateFacts) -> Table:
    table = plain_table("Candidate sets")
    table.add_row("sampled token inside", f"{facts.inside} of {facts.positions}")
    table.add_row("size: smallest, mean, largest", f"{facts.size_min}, {facts.size_mean:.1f}, {facts.size_max}")
    summed = f"1 ± {_small(facts.sum_error_max)} ({facts.summed_positions} positions)"
    table.add_row("probabilities sum to", summed if facts.summed_positions else "not summed: sets too large")
    table.add_row("probability in the vocabulary: lowest, mean", f"{facts.mass_min:.4f}, {facts.mass_mean:.4f}")
    return table


def _with(report: AuditReport, kind: ReplayKind) -> Mismatch | None:
    return next((row for row in report.rows if kind in row.replayed), None)


def _without(report: AuditReport, kind: ReplayKind) -> Mismatch | None:
    return next((row for row in report.rows if kind not in row.replayed), None)


def _small(value: float) -> str:
    return f"{value:.1e}"
