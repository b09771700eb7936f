"""Sequences that answer the same prompt, and what their rewards say about each other. Group ids may be any integers."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def numbered_groups(rewards: Float[Tensor, "S"], group_ids: Int[Tensor, "S"]) -> tuple[Int[Tensor, "S"], int]:
    """The ids as 0..G-1 in ascending order, and G.

    Raises ValueError for unequal shapes, no rewards, and rewards that are not finite.
    """
    for name, values in (("rewards", rewards), ("group_ids", group_ids)):
        if values.ndim != 1 or values.shape != rewards.shape:
            raise ValueError(f"{name} has shape {tuple(values.shape)}, expected [S], the same for both")
    if rewards.numel() == 0:
        raise ValueError("rewards is empty, expected at least one")
    if not rewards.isfinite().all():
        raise ValueError("rewards holds NaN or infinity, expected finite numbers")
    groups, ids = torch.unique(group_ids, return_inverse=True)
    return ids, groups.numel()


def groups_with_variance(rewards: Float[Tensor, "S"], group_ids: Int[Tensor, "S"]) -> Bool[Tensor, "S"]:
    """True for every sequence of a group whose rewards are not all the same: only such a group has anything to teach.

    Dynamic sampling, DAPO, arXiv 2503.14476, equation 11; `rewards` are those before overlong shaping, or lengths
    alone would keep a group whose answers are all right or all wrong. A group of one has no variance.

    Raises ValueError as numbered_groups does.
    """
    ids, groups = numbered_groups(rewards, group_ids)
    lowest, highest = _extremes(rewards, ids, groups)
    return (lowest < highest)[ids]


def best_against_worst(rewards: Float[Tensor, "S"], group_ids: Int[Tensor, "S"]) -> Int[Tensor, "P 2"]:
    """Positions of the best and of the worst sequence of each group with variance, by ascending group id.

    Of equal ones the earliest is taken. Preference pairs (chosen, rejected) for DPO.

    Raises ValueError as numbered_groups does.
    """
    ids, groups = numbered_groups(rewards, group_ids)
    lowest, highest = _extremes(rewards, ids, groups)
    pairs = torch.stack([_earliest(rewards == bound[ids], ids, groups) for bound in (highest, lowest)], dim=1)
    return pairs[lowest < highest]


def _extremes(
    rewards: Float[Tensor, "S"], ids: Int[Tensor, "S"], groups: int
) -> tuple[Float[Tensor, "G"], Float[Tensor, "G"]]:
    lowest, highest = (
        rewards.new_zeros(groups).scatter_reduce(0, ids, rewards, reduction, include_self=False)
        for reduction in ("amin", "amax")
    )
    return lowest, highest


def _earliest(chosen: Bool[Tensor, "S"], ids: Int[Tensor, "S"], groups: int) -> Int[Tensor, "G"]:
    positions = torch.arange(len(ids), device=ids.device).where(chosen, len(ids))
    return positions.new_zeros(groups).scatter_reduce(0, ids, positions, "amin", include_self=False)
