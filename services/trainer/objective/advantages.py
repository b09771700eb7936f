"""How much better than its group a sequence did."""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from services.trainer.objective.segments import segment_lengths, segment_mean, segment_sum


def numbered_groups(
    rewards: Real[Tensor, "sequences"], group_ids: Int[Tensor, "sequences"]
) -> tuple[Int[Tensor, "sequences"], int]:
    """The ids as 0..groups-1 in ascending order, and the number of groups.

    Raises ValueError for unequal shapes, no rewards, and rewards that are not finite.
    """
    for name, values in (("rewards", rewards), ("group_ids", group_ids)):
        if values.ndim != 1 or values.shape != rewards.shape:
            raise ValueError(f"{name} has shape {tuple(values.shape)}, expected [sequences], the same for both")
    if rewards.numel() == 0:
        raise ValueError("rewards is empty, expected at least one")
    if not rewards.isfinite().all():
        raise ValueError("rewards holds NaN or infinity, expected finite numbers")
    groups, ids = torch.unique(group_ids, return_inverse=True)
    return ids, groups.numel()


def groups_with_variance(
    rewards: Real[Tensor, "sequences"], group_ids: Int[Tensor, "sequences"]
) -> Bool[Tensor, "sequences"]:
    """True for every sequence of a group whose rewards are not all the same: only such a group has anything to teach.

    Dynamic sampling, DAPO, arXiv 2503.14476, equation 11; `rewards` are those before overlong shaping, or lengths
    alone would keep a group whose answers are all right or all wrong. A group of one has no variance.

    Raises ValueError as numbered_groups does.
    """
    ids, groups = numbered_groups(rewards, group_ids)
    lowest, highest = _extremes(rewards, ids, groups)
    return (lowest < highest)[ids]


def best_against_worst(
    rewards: Real[Tensor, "sequences"], group_ids: Int[Tensor, "sequences"]
) -> Int[Tensor, "pairs 2"]:
    """Positions of the best and of the worst sequence of each group with variance, by ascending group id.

    Of equal ones the earliest is taken. Preference pairs (chosen, rejected) for DPO.

    Raises ValueError as numbered_groups does.
    """
    ids, groups = numbered_groups(rewards, group_ids)
    lowest, highest = _extremes(rewards, ids, groups)
    pairs = torch.stack([_earliest(rewards == bound[ids], ids, groups) for bound in (highest, lowest)], dim=1)
    return pairs[lowest < highest]


def _extremes(
    rewards: Real[Tensor, "sequences"], ids: Int[Tensor, "sequences"], groups: int
) -> tuple[Real[Tensor, "groups"], Real[Tensor, "groups"]]:
    lowest, highest = (
        rewards.new_zeros(groups).scatter_reduce(0, ids, rewards, reduction, include_self=False)
        for reduction in ("amin", "amax")
    )
    return lowest, highest


def _earliest(chosen: Bool[Tensor, "sequences"], ids: Int[Tensor, "sequences"], groups: int) -> Int[Tensor, "groups"]:
    positions = torch.arange(len(ids), device=ids.device).where(chosen, len(ids))
    return positions.new_zeros(groups).scatter_reduce(0, ids, positions, "amin", include_self=False)


def overlong_penalty(lengths: Int[Tensor, "sequences"], max_length: int, buffer: int) -> Float[Tensor, "sequences"]:
    """0 up to max_length − buffer tokens, then falling evenly to −1 at max_length and beyond: added to the reward.

    Soft overlong punishment, DAPO, arXiv 2503.14476, equation 13. A sequence that was cut off at max_length pays 1.

    Raises ValueError for a buffer outside 1..max_length and for lengths that are not whole numbers of one axis.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"buffer is {buffer}, expected 1 to max_length ({max_length})")
    if lengths.ndim != 1 or lengths.dtype != torch.int64:
        raise ValueError(f"lengths is {lengths.dtype} of shape {tuple(lengths.shape)}, expected int64 of [sequences]")
    return ((max_length - buffer - lengths) / buffer).clamp(-1, 0)


Normalization = Literal["none", "std"]


def group_relative(
    rewards: Real[Tensor, "sequences"], group_ids: Int[Tensor, "sequences"], normalization: Normalization = "none"
) -> Float[Tensor, "sequences"]:
    """Reward minus the mean of its group; `std` divides by the group's sample standard deviation + 1e-6.

    GRPO, arXiv 2402.03300, section 4.1.2; without the division, Dr. GRPO, arXiv 2503.20783. Group ids may be any
    integers. A group of one has nothing to compare with: its advantage is 0. Rewards whose differences or squares
    overflow float64 have advantages that are not finite.

    Raises ValueError for unequal shapes, no rewards, rewards that are not finite, and an unknown normalization.
    """
    ids, groups = numbered_groups(rewards, group_ids)
    # In float64, or the rounding of a mean of equal rewards, divided by 1e-6, would pass for an advantage.
    exact = rewards.double()
    centered = exact - segment_mean(exact, ids, groups)[ids]
    match normalization:
        case "none":
            advantages = centered
        case "std":
            freedom = (segment_lengths(ids, groups) - 1).clamp(min=1)
            deviation = (segment_sum(centered.square(), ids, groups) / freedom).sqrt()
            # Where the squares overflow, no number rather than 0.
            advantages = centered / (deviation.where(deviation.isfinite(), math.nan)[ids] + 1e-6)
        case _:
            raise ValueError(f"normalization is {normalization!r}, expected none or std")
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype())
