"""What an algorithm is: its terms and the defaults its paper gives."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from services.trainer.objective.policy_term import Clip, PolicyTerm
from services.trainer.objective.types import AGGREGATIONS, Aggregation, LossInputs, LossOutputs
from services.trainer.objective.value import ValueLoss


class PreferenceLoss(Protocol):
    """Of the pairs of one micro-batch of a step of `total_pairs`; each number is the sum of an answer's log-probs."""

    def __call__(
        self,
        chosen: Float[Tensor, "pairs"],
        rejected: Float[Tensor, "pairs"],
        reference_chosen: Float[Tensor, "pairs"],
        reference_rejected: Float[Tensor, "pairs"],
        *,
        total_pairs: int,
        beta: float,
        label_smoothing: float,
    ) -> LossOutputs: ...


@dataclass(frozen=True)
class PreferenceAlgorithm:
    """`dynamic_sampling` asks the caller to replace groups that give no pair, where pairs are made of groups."""

    name: str
    loss: PreferenceLoss
    beta: float
    label_smoothing: float = 0.0
    dynamic_sampling: bool = True

    # As of an Algorithm: there is no value head.
    value = None

    def override(
        self,
        beta: float | None = None,
        label_smoothing: float | None = None,
        dynamic_sampling: bool | None = None,
    ) -> "PreferenceAlgorithm":
        """The same algorithm with what is not None in place of its defaults."""
        return replace(
            self,
            beta=self.beta if beta is None else beta,
            label_smoothing=self.label_smoothing if label_smoothing is None else label_smoothing,
            dynamic_sampling=self.dynamic_sampling if dynamic_sampling is None else dynamic_sampling,
        )


@dataclass(frozen=True)
class Algorithm:
    """`value` belongs to algorithms with a value head; an `entropy_coef` above 0 rewards entropy.

    `dynamic_sampling` asks the caller to replace groups without variance before they make up a step.

    Raises ValueError for an unknown aggregation, a negative entropy_coef, and by Clip for bounds that make no sense.
    """

    name: str
    policy_term: Callable[[LossInputs, Clip], PolicyTerm]
    aggregation: Aggregation
    clip_low: float
    clip_high: float
    value: ValueLoss | None = None
    entropy_coef: float = 0.0
    dynamic_sampling: bool = False

    def __post_init__(self) -> None:
        if self.aggregation not in AGGREGATIONS:
            raise ValueError(f"aggregation is {self.aggregation!r}, expected one of {', '.join(AGGREGATIONS)}")
        if not self.entropy_coef >= 0:
            raise ValueError(f"entropy_coef is {self.entropy_coef}, expected 0 or more")
        Clip(self.clip_low, self.clip_high)

    @property
    def clip(self) -> Clip:
        return Clip(self.clip_low, self.clip_high)

    def override(
        self,
        aggregation: Aggregation | None = None,
        clip_low: float | None = None,
        clip_high: float | None = None,
        value_coef: float | None = None,
        value_clip: float | None = None,
        entropy_coef: float | None = None,
        dynamic_sampling: bool | None = None,
    ) -> "Algorithm":
        """The same algorithm with what is not None in place of its defaults.

        Raises ValueError for value settings where there is no value head.
        """
        return replace(
            self,
            aggregation=self.aggregation if aggregation is None else aggregation,
            clip_low=self.clip_low if clip_low is None else clip_low,
            clip_high=self.clip_high if clip_high is None else clip_high,
            value=self._override_value(value_coef, value_clip),
            entropy_coef=self.entropy_coef if entropy_coef is None else entropy_coef,
            dynamic_sampling=self.dynamic_sampling if dynamic_sampling is None else dynamic_sampling,
        )

    def _override_value(self, coef: float | None, clip: float | None) -> ValueLoss | None:
        if self.value is None:
            for name, setting in (("value_coef", coef), ("value_clip", clip)):
                if setting is not None:
                    raise ValueError(f"{name} is {setting}, expected none: {self.name} has no value head")
            return None
        return ValueLoss(self.value.coef if coef is None else coef, self.value.clip if clip is None else clip)
