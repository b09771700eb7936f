"""Whether recorded steps came out again."""

from collections.abc import Collection, Iterator

from services.common.run_files.rerun_report import RerunReport, RerunStep


def differences(report: RerunReport) -> list[str]:
    """A sentence for each step that is not what was recorded, bit for bit; none where all are."""
    return [sentence for step in report.steps for sentence in _step(step)]


def _step(step: RerunStep) -> Iterator[str]:
    if step.starts_alike is False:
        yield f"step {step.step} starts from another state than recorded"
    unequal = [pair.name for pair in step.metrics if not pair.equal]
    if unequal:
        yield f"step {step.step}: {len(unequal)} of {len(step.metrics)} metrics differ: {', '.join(unequal)}"
    if step.ends_alike is False:
        yield f"step {step.step} ends with another state than recorded"


def outside(report: RerunReport, tolerance: float, names: Collection[str]) -> list[str]:
    """A sentence for each step metric, of those in `names` or of all, that exceeds the tolerance in any step.

    |recorded − rerun| > tolerance · max(1, |recorded|); a metric that is only on one side is outside any.
    """
    found = []
    for name in names or report.names:
        pairs = report.pairs(name)
        if not pairs:
            found.append(f"{name} is none of the step metrics, expected one of {', '.join(report.names)}")
            continue
        step, worst = max(pairs, key=lambda each: each[1].scaled)
        if not worst.scaled <= tolerance:
            found.append(
                f"{name} at step {step} is {_number(worst.rerun)}, recorded {_number(worst.recorded)}: "
                f"off by {worst.scaled:.3g}, expected at most {tolerance:g}"
            )
    return found


def _number(value: float | None) -> str:
    return "missing" if value is None else f"{value:.9g}"
