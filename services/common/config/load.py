import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from services.common.config.overrides import split_override
from services.common.config.root import Config
from services.common.errors import ConfigError
from services.common.secrets import hidden, hidden_override, without_secrets

ENVIRONMENT_PREFIX = "TRIVET__"
FILE_SUFFIX = "__FILE"


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
        raise ConfigError(f"{path}: is not YAML ({_place(error)})") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds {type(tree).__name__}, expected sections such as run: and model:")
    for keys, value in _from_environment(os.environ if environment is None else environment):
        _set(tree, keys, value, "environment variable " + ENVIRONMENT_PREFIX + "__".join(keys).upper())
    for override in overrides or []:
        key, text = split_override(override)
        _set(tree, key.split("."), _parse(text, f"override {key}=…"), f"override {hidden_override(override)!r}")
    return parse_config(tree, origin=str(path))


def parse_config(tree: dict[str, Any], origin: str = "configuration") -> Config:
    """Raises ConfigError."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [_sentence(problem) for problem in error.errors()]
        # The validation's own text holds the values, secrets too: it must not come along as the cause.
        raise ConfigError(f"{origin}: " + "; ".join(lines)) from None


def _sentence(problem: Any) -> str:
    field = ".".join(str(part) for part in problem["loc"])
    message = without_secrets(problem["msg"].removeprefix("Value error, "))
    if problem["type"] == "extra_forbidden":
        near = get_close_matches(str(problem["loc"][-1]), _keys_at(problem["loc"][:-1]), 1)
        return f"{field} is not a known key" + "".join(f": did you mean {each}?" for each in near)
    if problem["type"] == "missing" or (problem["input"] is None and _example(problem["loc"]) is not None):
        return _missing(problem["loc"])
    if problem["type"] == "model_type":
        given = "empty" if problem["input"] is None else f"a {type(problem['input']).__name__}"
        return f"{field} is {given}, expected a section with keys of its own"
    if problem["type"] == "value_error":
        return f"{field}: {message}" if field else message
    value = hidden(problem["input"], str(problem["loc"][-1]) if problem["loc"] else "")
    return f"{field} is {value!r}: {message}"


def _missing(location: tuple[str | int, ...]) -> str:
    """Names the key to write, and what to write, where the configuration knows an example."""
    field = ".".join(str(part) for part in location)
    example = _example(location)
    if example is None:
        return f"{field} is missing"
    keys, value = list(location), example
    while isinstance(value, dict):
        key, value = next(iter(value.items()))
        keys.append(key)
    for part in reversed(location):
        example = [example] if isinstance(part, int) else {part: example}
    written = yaml.safe_dump(example, default_flow_style=True, width=1000, sort_keys=False).strip()
    return f"{'.'.join(map(str, keys))} is missing, expected for example `{written[1:-1]}`"


def _example(location: tuple[str | int, ...]) -> Any:
    """That of a required field's own description; None where it has none."""
    field, _ = _look_up(location)
    return field.examples[0] if field is not None and field.is_required() and field.examples else None


def _keys_at(location: tuple[str | int, ...]) -> list[str]:
    """What the section there may hold."""
    _, section = _look_up(location)
    return [] if section is None else list(section.model_fields)


def _look_up(location: tuple[str | int, ...]) -> tuple[FieldInfo | None, type[BaseModel] | None]:
    """The field there, and the section that it is; None for what is not there."""
    section: type[BaseModel] | None = Config
    field: FieldInfo | None = None
    for part in location:
        if isinstance(part, int):
            continue
        field = section.model_fields.get(part) if section is not None else None
        if field is None:
            return None, None
        kinds = [field.annotation, *get_args(field.annotation)]
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    return field, section


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
        raise ConfigError(f"{origin}: is not YAML ({_place(error)})") from None


def _place(error: yaml.YAMLError) -> str:
    """Without the text around it, which may hold a secret."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "cannot be read"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else str(problem)


def _set(tree: dict[str, Any], keys: list[str], value: Any, origin: str) -> None:
    *parents, last = keys
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{origin}: {parent} is not a section")
        node = child
    node[last] = value
