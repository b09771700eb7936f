"""Whether an audit's numbers are good enough to train on."""

from dataclasses import dataclass

from services.common.run_files.audit_report import AuditReport, Mismatch


@dataclass(frozen=True)
class Thresholds:
    """For the row that the run trains with. Rounding alone decides how close two engines can be, so the dtype does.

    The usual acceptance elsewhere is a mean ratio within 1.0 ± 0.2 and a KL below 0.1.
    """

    difference_max: float
    ratio_error: float
    mismatch_kl: float
    # Lowest share over the MoE layers.
    agreement: float
    sum_error: float = 1e-4


DEFAULTS = {
    "float32": Thresholds(difference_max=1e-4, ratio_error=1e-3, mismatch_kl=1e-4, agreement=0.999),
    "bfloat16": Thresholds(difference_max=0.5, ratio_error=0.02, mismatch_kl=0.01, agreement=0.9),
}


def failures(report: AuditReport, limits: Thresholds) -> list[str]:
    """A sentence for each threshold that is violated; none when the audit passes. A number that is not finite fails."""
    row = report.row(*report.configured)
    found = []
    if not row.difference_max <= limits.difference_max:
        where = f"at token {row.worst_position} of {row.worst_sample}"
        found.append(f"|Δ log-prob| is {row.difference_max:.3g} {where}, expected at most {limits.difference_max:g}")
    if not abs(row.ratio_mean - 1) <= limits.ratio_error:
        found.append(f"mean ratio is {row.ratio_mean:.6f}, expected 1 ± {limits.ratio_error:g}")
    if not row.mismatch_kl < limits.mismatch_kl:
        found.append(f"mismatch KL is {row.mismatch_kl:.3g}, expected less than {limits.mismatch_kl:g}")
    found += _routing(row, limits)
    found += _candidates(report, limits)
    if report.refused:
        first = report.refused[0]
        found.append(f"the trainer refuses {len(report.refused)} groups, the first with {first.code}: {first.reason}")
    return found


def _routing(row: Mismatch, limits: Thresholds) -> list[str]:
    low = [layer for layer, share in enumerate(row.agreement) if not share >= limits.agreement]
    if not low:
        return []
    worst = min(row.agreement)
    return [f"routing agreement is down to {worst:.4f} in MoE layers {low}, expected at least {limits.agreement:g}"]


def _candidates(report: AuditReport, limits: Thresholds) -> list[str]:
    facts = report.candidates
    if facts is None:
        return []
    found = []
    if facts.inside != facts.positions:
        found.append(f"{facts.positions - facts.inside} sampled tokens are outside their candidate set, expected none")
    if not facts.sum_error_max <= limits.sum_error:
        found.append(
            f"probabilities over a candidate set sum to 1 ± {facts.sum_error_max:.3g}, "
            f"expected ± {limits.sum_error:g} at most"
        )
    return found
