"""Sums and means over the sequences of packed tokens."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def segment_lengths(sequence_ids: Int[Tensor, "tokens"], sequences: int) -> Int[Tensor, "sequences"]:
    # Not torch.bincount, which makes the host wait for the device.
    return sequence_ids.new_zeros(sequences).index_add(0, sequence_ids, torch.ones_like(sequence_ids))


def segment_sum(
    values: Float[Tensor, "tokens"], sequence_ids: Int[Tensor, "tokens"], sequences: int
) -> Float[Tensor, "sequences"]:
    return values.new_zeros(sequences).index_add(0, sequence_ids, values)


def segment_mean(
    values: Float[Tensor, "tokens"], sequence_ids: Int[Tensor, "tokens"], sequences: int
) -> Float[Tensor, "sequences"]:
    """NaN for a sequence without a token."""
    return segment_sum(values, sequence_ids, sequences) / segment_lengths(sequence_ids, sequences)
