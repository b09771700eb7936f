"""What a comparison of algorithms measured: the trainer's side writes it as JSON, and whoever shows it reads it."""

import math
import statistics

from pydantic import Field

from services.common.run_files.report import METRICS, Part, Report


class ComparedStep(Part):
    """`metrics` and the rows and columns of `cosines` stand in the order of the report's algorithms.

    A cosine is of two gradients over all parameters of the policy; None where one of them is zero or not there.
    """

    step: int
    samples: int
    metrics: tuple[dict[str, float], ...] = Field(validation_alias=METRICS)
    cosines: tuple[tuple[float | None, ...], ...]


class CompareReport(Report):
    KIND = "a comparison's report"

    run: str
    algorithms: tuple[str, ...]
    # What makes each algorithm's configuration out of the recorded one.
    overrides: tuple[tuple[str, ...], ...]
    steps: tuple[ComparedStep, ...]

    @property
    def names(self) -> list[str]:
        """Of all step metrics of any algorithm, in alphabetical order."""
        return sorted({name for step in self.steps for metrics in step.metrics for name in metrics})

    def mean(self, name: str, algorithm: int) -> float | None:
        """Over the steps where it is finite; None where the algorithm has no such metric."""
        found = [step.metrics[algorithm][name] for step in self.steps if name in step.metrics[algorithm]]
        found = [value for value in found if math.isfinite(value)]
        return statistics.fmean(found) if found else None

    def cosine(self, first: int, second: int) -> float | None:
        """Mean over the steps where both gradients are there."""
        found = [cosine for step in self.steps if (cosine := step.cosines[first][second]) is not None]
        return statistics.fmean(found) if found else None
