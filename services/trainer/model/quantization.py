"""Weights as int8 with a scale for each output row, multiplied out whenever the model reads them.

Symmetric, weight-only: scale = max|w| / 127 over the row's inputs, value = round(w / scale), so that no weight moves by
more than half a scale. A parametrization on the parameter does it, because that reaches the fused experts of
transformers 5.x, which are one tensor [experts, ...] and no nn.Linear, in every family alike.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float, Int8
from torch import Tensor, nn
from torch.nn.utils import parametrize

LARGEST = 127
_ROUTER_OR_GATE = re.compile(r"(^|[._])(gate|gating|router)(\.|$)")


class RowScaled(nn.Module):
    """`inputs` is the dimension that a scale spans: -1 where the weight is [..., out, in], -2 for [..., in, out].

    Scales have the weight's own type, and values are rounded to the scales as they are stored: mixed types are several
    times slower to multiply.
    """

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self._inputs = inputs

    def right_inverse(self, weight: Float[Tensor, "*shape"]) -> tuple[Int8[Tensor, "*shape"], Float[Tensor, "*scales"]]:
        """Values, and scales that keep `inputs` as a dimension of 1."""
        scales = weight.detach().abs().amax(dim=self._inputs, keepdim=True) / LARGEST
        wide = scales.float().clamp_min(torch.finfo(torch.float32).tiny)
        values = (weight.detach().float() / wide).round_().clamp_(-LARGEST, LARGEST)
        return values.to(torch.int8), scales

    def forward(self, values: Int8[Tensor, "*shape"], scales: Float[Tensor, "*scales"]) -> Float[Tensor, "*shape"]:
        return values.to(scales.dtype).mul_(scales)


def quantize(model: Any) -> None:
    """In place, for a causal LM that is never trained again.

    Takes the weights of nn.Linear and of fused experts. Embeddings, output matrix, routers, gates, norms and biases
    stay as they are: they are a small part of a large model, an error in the output matrix goes into every logit, and
    one in a router can change which experts run.
    """
    model.requires_grad_(False)
    for module, name, inputs in list(_weights(model)):
        parametrize.register_parametrization(module, name, RowScaled(inputs))


def _weights(model: Any) -> Iterator[tuple[nn.Module, str, int]]:
    output = model.get_output_embeddings()
    for path, module in model.named_modules():
        if _ROUTER_OR_GATE.search(path) or module is output:
            continue
        if isinstance(module, nn.Linear):
            yield module, "weight", -1
        elif hasattr(module, "is_transposed"):
            # What transformers' decorator for fused experts leaves on them.
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim == 3:
                    yield module, name, -2 if module.is_transposed else -1
