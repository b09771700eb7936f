"""Numbers of tokens that are too large, or have a factor that is too large, to be written down as they are.

A ratio exp(lp − old) overflows float32 past 88 nats, while its product with a weight near 0 may be small. Infinity
times zero is NaN, in the loss or in its gradient; so what overflows is kept apart from its scale, and the two meet in
log space.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Scaled:
    """`value` · exp(`log_scale`): `value` is finite and carries the gradient, `log_scale` is 0 or more, mostly 0."""

    value: Float[Tensor, "tokens"]
    log_scale: Float[Tensor, "tokens"]

    @property
    def wide(self) -> Float[Tensor, "tokens"]:
        """The number itself, in float64 and without gradient."""
        return self.value.detach().double() * self.log_scale.double().exp()


def unscaled(value: Float[Tensor, "tokens"]) -> Scaled:
    return Scaled(value, torch.zeros_like(value, requires_grad=False))


def scaled_weights(
    weights: Float[Tensor, "tokens"], log_weights: Float[Tensor, "tokens"], log_scale: Float[Tensor, "tokens"]
) -> Float[Tensor, "tokens"]:
    """weight · exp(log_scale), by way of the weight's logarithm where there is a scale."""
    return weights.where(log_scale == 0, (log_weights + log_scale).exp())


def wide_exp(logs: Float[Tensor, "tokens"]) -> Float[Tensor, "tokens"]:
    """exp in float64 where its own type overflows, and else to the last bit what its own type says; no gradient."""
    own = logs.detach().exp()
    return own.double().where(own.isfinite(), logs.detach().double().exp())


def log_of(number: float) -> float:
    return math.log(number) if number > 0 else -math.inf
