"""AdamW over the policy, with a critic of its own at a rate of its own."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from services.common.config import Config, OptimizerConfig
from services.trainer.model.policy import Policy
from services.trainer.model.sharding import whole_shape


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Of optimizer step `step` (0-based): a linear warm-up to the peak, then constant, or decay to final_ratio of it.

    The last of `total_steps` has the final value; steps beyond keep it.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return config.learning_rate
    span = max(1, total_steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    remaining = 1 - progress if config.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * (config.final_ratio + (1 - config.final_ratio) * remaining)


@dataclass(frozen=True)
class ParameterGroup:
    """`peak` is the highest learning rate of its schedule."""

    parameters: Sequence[nn.Parameter]
    weight_decay: float
    peak: float


def parameter_groups(policy: Policy, config: Config) -> list[ParameterGroup]:
    """Matrices with weight decay and vectors without it, the policy's first, then the separate critic's."""
    settings = config.trainer.optimizer
    rate = config.algorithm.critic_learning_rate
    critic = [] if policy.critic is None else list(policy.critic.parameters())
    own = {id(parameter) for parameter in critic}
    groups = []
    for parameters, peak in (
        ([parameter for parameter in policy.parameters() if id(parameter) not in own], settings.learning_rate),
        (critic, settings.learning_rate if rate is None else rate),
    ):
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        groups.append(ParameterGroup([p for p in trained if len(whole_shape(p)) > 1], settings.weight_decay, peak))
        groups.append(ParameterGroup([p for p in trained if len(whole_shape(p)) <= 1], 0.0, peak))
    return [group for group in groups if group.parameters]


def build_optimizer(groups: Sequence[ParameterGroup], config: Config) -> torch.optim.Optimizer:
    settings = config.trainer.optimizer
    return torch.optim.AdamW(
        [{"params": list(group.parameters), "weight_decay": group.weight_decay} for group in groups],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )


def set_learning_rates(
    param_groups: Iterable[dict[str, Any]], peaks: Sequence[float], config: Config, step: int, total_steps: int
) -> float:
    """Each group's rate of optimizer step `step`, all with the same schedule below their peak; returns the policy's."""
    settings = config.trainer.optimizer
    for group, peak in zip(param_groups, peaks, strict=True):
        group["lr"] = learning_rate(settings.model_copy(update={"learning_rate": peak}), step, total_steps)
    return learning_rate(settings, step, total_steps)
