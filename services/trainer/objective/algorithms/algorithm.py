"""What an algorithm is: a policy term and the defaults its paper gives."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from services.trainer.objective.policy_term import Clip, PolicyTerm
from services.trainer.objective.types import AGGREGATIONS, Aggregation, LossInputs


@dataclass(frozen=True)
class Algorithm:
    """Raises ValueError for an unknown aggregation, and by Clip for bounds that make no sense."""

    name: str
    policy_term: Callable[[LossInputs, Clip], PolicyTerm]
    aggregation: Aggregation
    clip_low: float
    clip_high: float

    def __post_init__(self) -> None:
        if self.aggregation not in AGGREGATIONS:
            raise ValueError(f"aggregation is {self.aggregation!r}, expected one of {', '.join(AGGREGATIONS)}")
        Clip(self.clip_low, self.clip_high)

    @property
    def clip(self) -> Clip:
        return Clip(self.clip_low, self.clip_high)

    def override(
        self,
        aggregation: Aggregation | None = None,
        clip_low: float | None = None,
        clip_high: float | None = None,
    ) -> "Algorithm":
        """The same algorithm with what is not None in place of its defaults."""
        return replace(
            self,
            aggregation=self.aggregation if aggregation is None else aggregation,
            clip_low=self.clip_low if clip_low is None else clip_low,
            clip_high=self.clip_high if clip_high is None else clip_high,
        )
