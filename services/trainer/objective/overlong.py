"""What an answer pays for running out of room."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def overlong_penalty(lengths: Int[Tensor, "S"], max_length: int, buffer: int) -> Float[Tensor, "S"]:
    """0 up to max_length − buffer tokens, then falling evenly to −1 at max_length and beyond: added to the reward.

    Soft overlong punishment, DAPO, arXiv 2503.14476, equation 13. A sequence that was cut off at max_length pays 1.

    Raises ValueError for a buffer outside 1..max_length and for lengths that are not whole numbers of one axis.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer is {buffer}, expected 1 to max_length ({max_length})")
    if lengths.ndim != 1 or lengths.dtype != torch.int64:
        raise ValueError(f"lengths is {lengths.dtype} of shape {tuple(lengths.shape)}, expected torch.int64 of [S]")
    return ((max_length - buffer - lengths) / buffer).clamp(-1, 0)
