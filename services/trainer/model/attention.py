"""torch's own flash kernel for samples packed side by side, as an attention of transformers.

Its work grows with the squares of the samples' lengths, not of the row's, and there is no mask of tokens × tokens. It
comes with torch, so that the trainer needs no further package.
"""

import weakref
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from services.common.errors import InvalidData

# The name under which transformers knows it.
NAME = "trivet_varlen"


def register_varlen_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(NAME, varlen_attention)
    # Like the other flash kernels it gets the ends of the samples, and takes no mask.
    AttentionMaskInterface.register(NAME, flash_attention_mask)


def varlen_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads positions head_width"],
    key: Float[Tensor, "1 kv_heads positions head_width"],
    value: Float[Tensor, "1 kv_heads positions value_width"],
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    position_ids: Int[Tensor, "1 positions"] | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "1 positions heads value_width"], None]:
    """Causal within each sample; a sample begins where position ids are 0.

    Raises InvalidData for what the kernel does not compute: soft-capped scores, attention sinks, a mask, dropout,
    several rows, or a model that does not hand position ids on.
    """
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise _unsupported(f"{name} of {type(module).__name__}")
    if attention_mask is not None or dropout > 0 or query.shape[0] != 1:
        raise _unsupported(f"a mask, dropout or several rows (of {type(module).__name__})")
    if position_ids is None:
        raise _unsupported(f"{type(module).__name__} without position ids")
    bounds = _bounds(position_ids)
    longest = query.shape[2]
    width, value_width = query.shape[-1], value.shape[-1]
    if value_width < width:
        # Multi-head latent attention has narrower values, and the kernel one width.
        value = nn.functional.pad(value, (0, width - value_width))
    rows, columns, values = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    output = varlen_attn(
        rows,
        columns,
        values,
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        # transformers counts the token itself, the kernel those before it.
        window_size=(sliding_window - 1 if sliding_window else -1, 0),
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return cast(Tensor, output)[None, ..., :value_width], None


class _Bounds:
    """Where the samples of a row begin and end; once a row, not once a layer, because finding waits for the GPU."""

    def __init__(self) -> None:
        self._row: weakref.ref[Tensor] | None = None
        self._found: Int[Tensor, " bounds"] = torch.zeros(0, dtype=torch.int32)

    def __call__(self, position_ids: Int[Tensor, "1 positions"]) -> Int[Tensor, " bounds"]:
        if self._row is None or self._row() is not position_ids:
            starts = torch.nonzero(position_ids[0] == 0)[:, 0].to(torch.int32)
            self._found = nn.functional.pad(starts, (0, 1), value=position_ids.shape[1])
            self._row = weakref.ref(position_ids)
        return self._found


_bounds = _Bounds()


def _unsupported(what: str) -> InvalidData:
    return InvalidData("attention_unsupported", f"model.attention is varlen, which does not take {what}")
