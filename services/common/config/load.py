import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from services.common.config.root import Config

ENVIRONMENT_PREFIX = "TRIVET__"
FILE_SUFFIX = "__FILE"


class ConfigError(Exception):
    """The configuration cannot be used; the message names each field, its value and what was expected."""


def load_config(
    path: str | Path, overrides: list[str] | None = None, environment: Mapping[str, str] | None = None
) -> Config:
    """Reads the YAML at `path`, then applies the environment, then `overrides`, each "section.key=value" in YAML.

    The environment variable TRIVET__SECTION__KEY sets section.key to its value, read as YAML, and
    TRIVET__SECTION__KEY__FILE to the text of the file that it names, as secrets come. Without `environment`, the
    process's own.

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
    for keys, value in _from_environment(os.environ if environment is None else environment):
        _set(tree, keys, value, "environment variable " + ENVIRONMENT_PREFIX + "__".join(keys).upper())
    for override in overrides or []:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"override {override!r}: expected section.key=value")
        _set(tree, key.split("."), _parse(text, f"override {override!r}"), f"override {override!r}")
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


def _from_environment(environment: Mapping[str, str]) -> list[tuple[list[str], Any]]:
    found = []
    for name, text in sorted(environment.items()):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        path = name.removeprefix(ENVIRONMENT_PREFIX)
        if path.endswith(FILE_SUFFIX):
            found.append((_keys(path.removesuffix(FILE_SUFFIX)), _secret(name, text)))
        else:
            found.append((_keys(path), _parse(text, f"environment variable {name}")))
    return found


def _keys(path: str) -> list[str]:
    return path.lower().split("__")


def _secret(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"environment variable {name}: {path} cannot be read ({error.strerror})") from error


def _parse(text: str, origin: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: is not YAML ({error})") from error


def _set(tree: dict[str, Any], keys: list[str], value: Any, origin: str) -> None:
    *parents, last = keys
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{origin}: {parent} is not a section")
        node = child
    node[last] = value
