"""Which sequences drifted too far from the policy that sampled them to be learned from.

DeepSeek-V3.2 report, arXiv 2512.02556, section 3.1, "Off-Policy Sequence Masking".
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from services.trainer.objective.segments import segment_mean


def sequence_divergence(
    logprobs: Float[Tensor, "tokens"],
    rollout_logprobs: Float[Tensor, "tokens"],
    sequence_ids: Int[Tensor, "tokens"],
    sequences: int,
) -> Float[Tensor, "sequences"]:
    """Mean of rollout − current log-prob over each sequence, in nats per token; carries no gradient."""
    return segment_mean((rollout_logprobs - logprobs).detach(), sequence_ids, sequences)


def keep_sequences(
    advantages: Float[Tensor, "sequences"],
    divergence: Float[Tensor, "sequences"],
    threshold: float,
    min_keep_ratio: float,
) -> Bool[Tensor, "sequences"]:
    """False where the advantage is negative and the divergence above `threshold`.

    The sequences are those of the whole step here, all ranks together: at least ceil(min_keep_ratio · sequences) stay
    kept, and for that the least divergent masked ones return first (of equal ones, the earlier).

    Raises ValueError for unequal shapes, NaN, and a min_keep_ratio outside 0..1.
    """
    for name, values in (("advantages", advantages), ("divergence", divergence)):
        if values.ndim != 1 or values.shape != advantages.shape:
            raise ValueError(f"{name} has shape {tuple(values.shape)}, expected [sequences], the same for both")
        if values.isnan().any():
            raise ValueError(f"{name} holds NaN, expected numbers")
    if not 0 <= min_keep_ratio <= 1:
        raise ValueError(f"min_keep_ratio is {min_keep_ratio}, expected 0 to 1")
    masked = (advantages < 0) & (divergence > threshold)
    # The product is rounded up only past its own rounding error: 0.07 · 100 asks for 7, not 8.
    fewest = math.ceil(min_keep_ratio * masked.numel() - 1e-9)
    missing = fewest - (~masked).sum()
    by_divergence = divergence.where(masked, math.inf).argsort(stable=True)
    rank = torch.empty_like(by_divergence).index_copy(
        0, by_divergence, torch.arange(masked.numel(), device=masked.device)
    )
    return ~masked | (rank < missing)
