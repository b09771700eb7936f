"""What an algorithm is that learns from pairs of answers, of which one is preferred."""

from dataclasses import dataclass, replace
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from services.trainer.objective.outputs import LossOutputs


class PreferenceLoss(Protocol):
    """B pairs of one micro-batch of a step of `total_pairs`; each number is the sum of an answer's log-probs."""

    def __call__(
        self,
        chosen: Float[Tensor, "B"],
        rejected: Float[Tensor, "B"],
        reference_chosen: Float[Tensor, "B"],
        reference_rejected: Float[Tensor, "B"],
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
