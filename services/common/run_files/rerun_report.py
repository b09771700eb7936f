"""What came of running recorded steps again: the trainer's side writes it as JSON and the CLI reads it."""

import math
from typing import Literal

from pydantic import Field

from services.common.run_files.report import METRICS, Part, Report


class MetricPair(Part):
    """A step metric, as recorded and as it came out again; None where one of the two has no such metric."""

    name: str
    recorded: float | None
    rerun: float | None
    # Bit for bit, except that every NaN counts as the same.
    equal: bool

    @property
    def absolute(self) -> float:
        """|recorded − rerun|; infinite where only one is finite, or there."""
        if self.equal:
            return 0.0
        if self.recorded is None or self.rerun is None:
            return math.inf
        difference = abs(self.recorded - self.rerun)
        return difference if math.isfinite(difference) else math.inf

    @property
    def relative(self) -> float:
        """|recorded − rerun| over the larger of the two."""
        if self.absolute == 0 or not math.isfinite(self.absolute):
            return self.absolute
        return self.absolute / max(abs(self.recorded or 0.0), abs(self.rerun or 0.0))

    @property
    def scaled(self) -> float:
        """|recorded − rerun| over max(1, |recorded|): what a tolerance is compared with."""
        return self.absolute / max(1.0, abs(self.recorded or 0.0)) if math.isfinite(self.absolute) else math.inf


class RerunStep(Part):
    """`starts_alike` and `ends_alike` compare digests of the whole training state; None where ranks or stage differ."""

    step: int
    starts_alike: bool | None
    ends_alike: bool | None
    metrics: tuple[MetricPair, ...] = Field(validation_alias=METRICS)


class RerunReport(Report):
    KIND = "the report of a rerun"

    run: str
    overrides: tuple[str, ...]
    # From the engine's recorded state, or from the recorded policy with a new optimizer.
    start: Literal["engine", "policy"]
    recorded_world_size: int
    recorded_zero_stage: int
    world_size: int
    zero_stage: int
    # What is not as it was when the steps were recorded, each a sentence.
    warnings: tuple[str, ...]
    steps: tuple[RerunStep, ...]

    @property
    def exact(self) -> bool:
        """Whether equality can be asked for: nothing was changed on purpose."""
        return not self.overrides

    @property
    def names(self) -> list[str]:
        """Of all step metrics, in alphabetical order."""
        return sorted({pair.name for step in self.steps for pair in step.metrics})

    def pairs(self, name: str) -> list[tuple[int, MetricPair]]:
        """By step."""
        return [(step.step, pair) for step in self.steps for pair in step.metrics if pair.name == name]
