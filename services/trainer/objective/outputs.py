from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from services.trainer.objective.metrics import Metrics


@dataclass(frozen=True, eq=False)
class LossOutputs:
    """`loss` carries gradient and is this micro-batch's share of the step's loss: add shares up, never average them.

    Where the training engine averages gradients over ranks, multiply by the number of ranks.
    """

    loss: Float[Tensor, ""]
    metrics: Metrics
