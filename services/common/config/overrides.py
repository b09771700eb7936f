"""Overrides of a configuration, "section.key=value" with a YAML value: from --set, and on to other processes."""

import json
import os
from collections.abc import Iterable, Sequence

from services.common.errors import ConfigError
from services.common.secrets import hidden_override, without_secrets

# A JSON list of overrides, applied before those of the command line: unlike arguments, others cannot read it.
OVERRIDES_VARIABLE = "TRIVET_OVERRIDES"
# The same for `trivet compare --set-for`.
OVERRIDES_FOR_VARIABLE = "TRIVET_OVERRIDES_FOR"
# Of --set, for every command that has it.
METAVAR, HELP = "SECTION.KEY=VALUE", "override; repeatable"


def all_overrides(given: Iterable[str] | None = None, variable: str = OVERRIDES_VARIABLE) -> list[str]:
    """Those of the environment, then those of the command line."""
    return [*json.loads(os.environ.get(variable, "[]")), *(given or [])]


def overrides_environment(overrides: Sequence[str], variable: str = OVERRIDES_VARIABLE) -> dict[str, str]:
    """For a process to start: secrets among them must not show in the list of processes."""
    return {variable: json.dumps(list(overrides))}


def split_override(override: str) -> tuple[str, str]:
    """Key and value. Raises ConfigError."""
    key, equals, value = override.partition("=")
    if not (key and equals):
        raise _refused(override, "expected section.key=value")
    return key, value


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
            raise _refused(override, "expected algorithm:section.key=value")
        if name not in own:
            raise _refused(override, f"{name} is not among the algorithms ({', '.join(algorithms)})")
        own[name].append(f"{setting}={value}")
    return own


def _refused(override: str, problem: str) -> ConfigError:
    return ConfigError(f"override {without_secrets(hidden_override(override))!r}: {problem}")
