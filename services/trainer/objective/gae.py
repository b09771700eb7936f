"""How much better each token did than the value head expected: generalized advantage estimation."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from services.trainer.objective.segments import segment_lengths


def terminal_rewards(
    rewards: Float[Tensor, "sequences"], sequence_ids: Int[Tensor, "tokens"], sequences: int
) -> Float[Tensor, "tokens"]:
    """The sequence's reward on its last token, 0 on all before.

    Raises ValueError for a number of rewards other than `sequences` and for a sequence without a token.
    """
    if rewards.shape != (sequences,):
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}, expected {(sequences,)}")
    if not segment_lengths(sequence_ids, sequences).all():
        raise ValueError(f"sequence_ids leave a sequence of {sequences} without a token, expected at least one")
    positions = torch.arange(len(sequence_ids), device=sequence_ids.device)
    last = positions.new_zeros(sequences).scatter_reduce(0, sequence_ids, positions, "amax")
    return rewards.new_zeros(len(sequence_ids)).index_copy(0, last, rewards)


def generalized_advantages(
    rewards: Float[Tensor, "tokens"],
    values: Float[Tensor, "tokens"],
    sequence_ids: Int[Tensor, "tokens"],
    sequences: int,
    gamma: float = 1.0,
    lambda_: float = 0.95,
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """Advantages Σ_k (gamma·lambda)^k · δ(t+k) with δ(t) = reward(t) + gamma·V(t+1) − V(t), and returns A + V.

    arXiv 1506.02438, equations 11 and 16. V(t) is the value before token t is chosen, read where its logits are. Past
    a sequence's last token the value is 0, whether it ended or was cut off. Sequences may interleave; the tokens of
    each stand in the order in which they were sampled. Neither result carries gradient.

    Raises ValueError for unequal shapes, numbers that are not finite, and gamma or lambda_ outside 0..1.
    """
    for name, per_token in (("rewards", rewards), ("values", values)):
        if per_token.ndim != 1 or per_token.shape != sequence_ids.shape:
            raise ValueError(f"{name} has shape {tuple(per_token.shape)}, expected {tuple(sequence_ids.shape)}")
        if not per_token.isfinite().all():
            raise ValueError(f"{name} holds NaN or infinity, expected finite numbers")
    for name, factor in (("gamma", gamma), ("lambda_", lambda_)):
        if not 0 <= factor <= 1:
            raise ValueError(f"{name} is {factor}, expected 0 to 1")
    order = sequence_ids.argsort(stable=True)
    ids, value = sequence_ids[order], values.detach()[order].double()
    advantages = rewards.detach()[order].double() + gamma * _ahead(value, ids, 1) - value
    reach, longest = 1, int(segment_lengths(sequence_ids, sequences).max())
    # After each round the sum spans twice as many tokens, so that a long sequence takes few rounds.
    while reach < longest:
        advantages = advantages + (gamma * lambda_) ** reach * _ahead(advantages, ids, reach)
        reach *= 2
    unsorted = torch.empty_like(advantages).index_copy(0, order, advantages)
    return unsorted.to(values.dtype), (unsorted + values.detach()).to(values.dtype)


def _ahead(per_token: Float[Tensor, "tokens"], ids: Int[Tensor, "tokens"], distance: int) -> Float[Tensor, "tokens"]:
    """What stands `distance` tokens later in the same sequence, 0 past its end; sequences stand one after another."""
    same = ids[distance:] == ids[:-distance]
    return torch.cat([per_token[distance:].where(same, 0.0), per_token.new_zeros(distance)])
