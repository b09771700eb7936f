"""The same configuration for another algorithm."""

from typing import Any

import yaml

from services.common.config import AlgorithmConfig, Config

# What an algorithm sets by itself, or alone can use. The rest of the section means the same for all of them.
OWN_SETTINGS = (
    "clip_low",
    "clip_high",
    "aggregation",
    "dynamic_sampling",
    "value_coef",
    "value_clip",
    "entropy_coef",
    "critic",
    "critic_path",
    "critic_learning_rate",
    "beta",
    "label_smoothing",
)


def algorithm_overrides(config: Config, name: str) -> list[str]:
    """Overrides after which `config` asks for the algorithm `name` with its own defaults.

    None where it is the configured one already: that keeps whatever is set for it.
    """
    if config.algorithm.name == name:
        return []
    overrides = [f"algorithm.name={name}"]
    for setting in OWN_SETTINGS:
        default = AlgorithmConfig.model_fields[setting].default
        if getattr(config.algorithm, setting) != default:
            overrides.append(f"algorithm.{setting}={_as_yaml(default)}")
    return overrides


def _as_yaml(value: Any) -> str:
    return yaml.safe_dump(value).splitlines()[0]
