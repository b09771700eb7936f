"""How much better than its group a sequence did."""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from services.trainer.objective.groups import numbered_groups
from services.trainer.objective.segments import segment_lengths, segment_mean, segment_sum

Normalization = Literal["none", "std"]


def group_relative(
    rewards: Float[Tensor, "S"], group_ids: Int[Tensor, "S"], normalization: Normalization = "none"
) -> Float[Tensor, "S"]:
    """Reward minus the mean of its group; `std` divides by the group's sample standard deviation + 1e-6.

    GRPO, arXiv 2402.03300, section 4.1.2; without the division, Dr. GRPO, arXiv 2503.20783. Group ids may be any
    integers. A group of one has nothing to compare with: its advantage is 0.

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
            advantages = centered / (deviation[ids] + 1e-6)
        case _:
            raise ValueError(f"normalization is {normalization!r}, expected none or std")
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype())
