"""From the rewards of a step's groups to the advantages of their samples."""

from collections.abc import Sequence

import torch
from trivet.v1 import sample_pb2

from services.common.config import Config
from services.trainer.objective import group_relative, groups_with_variance, overlong_penalty
from services.trainer.objective.advantages import Normalization


def shaped_rewards(groups: Sequence[sample_pb2.ScoredGroup], config: Config) -> list[list[float]]:
    """Each group's rewards as they were scored, less what overlong answers pay (algorithm.overlong_buffer)."""
    rewards = [[score.reward for score in scored.scores] for scored in groups]
    buffer = config.algorithm.overlong_buffer
    if not buffer:
        return rewards
    shaped = []
    for scored, given in zip(groups, rewards, strict=True):
        lengths = torch.tensor([len(sample.token_ids) for sample in scored.group.samples])
        # As the group was sampled: sampling.max_tokens may have changed since.
        limit = scored.group.prompt.sampling.max_tokens
        penalty = overlong_penalty(lengths, limit, min(buffer, limit)).tolist()
        shaped.append([reward + paid for reward, paid in zip(given, penalty, strict=True)])
    return shaped


def has_variance(scored: sample_pb2.ScoredGroup) -> bool:
    """By the rewards as they were scored, before any shaping."""
    rewards = torch.tensor([score.reward for score in scored.scores], dtype=torch.float64)
    return bool(groups_with_variance(rewards, torch.zeros(len(rewards), dtype=torch.int64)).any())


def advantages_in_groups(rewards: Sequence[Sequence[float]], normalization: Normalization) -> list[list[float]]:
    """Relative to the group, in the same order."""
    flat = torch.tensor([reward for group in rewards for reward in group], dtype=torch.float64)
    ids = torch.tensor([index for index, group in enumerate(rewards) for _ in group])
    advantages = iter(group_relative(flat, ids, normalization).tolist())
    return [[next(advantages) for _ in group] for group in rewards]
