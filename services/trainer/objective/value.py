"""What the value head learns."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class ValueLoss:
    """coef · half the squared error; `clip` bounds how far a value may move in a step; 0 for no bound.

    Raises ValueError for a coef or clip that is negative or not a number.
    """

    coef: float = 0.5
    clip: float = 0.2

    def __post_init__(self) -> None:
        if not self.coef >= 0:
            raise ValueError(f"value_coef is {self.coef}, expected 0 or more")
        if not self.clip >= 0:
            raise ValueError(f"value_clip is {self.clip}, expected 0 or more")


@dataclass(frozen=True, eq=False)
class ValueTerm:
    loss: Float[Tensor, "tokens"]
    clipped: Bool[Tensor, "tokens"]  # where clipping changed the term


def value_term(
    values: Float[Tensor, "tokens"], old_values: Float[Tensor, "tokens"], returns: Float[Tensor, "tokens"], clip: float
) -> ValueTerm:
    """max((V − R)², (V_old + clamp(V − V_old, ±clip) − R)²) / 2: no gradient once V has moved far enough towards R.

    The squared error is PPO's, arXiv 1707.06347, equation 9; clip, maximum and the half are those of PPO2 in OpenAI
    Baselines (2017). The maximum is the pessimistic choice: a value that moves away from R is never spared.
    """
    old_values, returns = old_values.detach(), returns.detach()
    free = (values - returns).square()
    if clip == 0:
        return ValueTerm(loss=free / 2, clipped=torch.zeros_like(free, dtype=torch.bool))
    bounded = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return ValueTerm(loss=torch.maximum(free, bounded) / 2, clipped=bounded > free)
