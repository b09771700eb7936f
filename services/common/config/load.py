from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from services.common.config.root import Config


class ConfigError(Exception):
    """The configuration cannot be used; the message names each field, its value and what was expected."""


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Reads the YAML at `path` and applies `overrides`, each "section.key=value" with a YAML value.

    Raises ConfigError.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML ({error})") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds {type(tree).__name__}, expected sections such as run: and model:")
    for override in overrides or []:
        _apply(tree, override)
    return parse_config(tree, origin=str(path))


def parse_config(tree: dict[str, Any], origin: str = "configuration") -> Config:
    """Raises ConfigError."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [_sentence(problem) for problem in error.errors()]
        raise ConfigError(f"{origin}: " + "; ".join(lines)) from error


def _sentence(problem: Any) -> str:
    field = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        return f"{field} is not a known key"
    if problem["type"] == "missing":
        return f"{field} is missing"
    if problem["type"] == "value_error":
        return f"{field}: {message}" if field else message
    return f"{field} is {problem['input']!r}: {message}"


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r}: expected section.key=value")
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {parent} is not a section")
        node = child
    node[last] = yaml.safe_load(value)
