"""The same configuration for another algorithm."""

from collections.abc import Sequence
from typing import Any

import yaml

from services.common.config import AlgorithmConfig, Config, ConfigError

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


def overrides_by_algorithm(overrides: Sequence[str], algorithms: Sequence[str]) -> dict[str, list[str]]:
    """Each of `overrides` is "algorithm:section.key=value".

    Raises ConfigError for one that is not, and for an algorithm that is not among them.
    """
    own: dict[str, list[str]] = {name: [] for name in algorithms}
    for override in overrides:
        key, equals, value = override.partition("=")
        # The algorithm itself may be module:function.
        name, colon, setting = key.rpartition(":")
        if not (equals and colon):
            raise ConfigError(f"override {override!r}: expected algorithm:section.key=value")
        if name not in own:
            raise ConfigError(f"override {override!r}: {name} is not among the algorithms ({', '.join(algorithms)})")
        own[name].append(f"{setting}={value}")
    return own


def _as_yaml(value: Any) -> str:
    return yaml.safe_dump(value).splitlines()[0]
