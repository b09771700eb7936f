"""What the policy's own trunk expects of a sequence's reward, token by token."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from services.trainer.ragged import sum_dtype


class ValueHead(nn.Module):
    """A linear map of the hidden state to one number, 0 before the first step.

    Computes in float32, or float64 for float64 input, whatever the parameters are stored in: DeepSpeed keeps those of a
    bf16 engine in bf16, beside a float32 copy for the optimizer.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, width, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(1, dtype=torch.float32))

    def forward(self, hidden: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens"]:
        dtype = sum_dtype(hidden)
        return linear(hidden.to(dtype), self.weight.to(dtype), self.bias.to(dtype)).squeeze(1)
