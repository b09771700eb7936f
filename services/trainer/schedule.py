"""The learning rate over optimizer steps."""

import math

from services.common.config import OptimizerConfig


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
