"""Scorers by name, or by import path "module:function"; a scorer's module is imported only where it is used."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from services.common.errors import InvalidData
from services.reward.scorers.types import Scorer, ScorerSettings
from services.reward.scorers.user import user_scorer

# Each module has build(**options) -> Scorer.
BUILT_IN: Mapping[str, str] = {
    name: f"services.reward.scorers.{name}"
    for name in ("exact_match", "math_verify", "numeric", "reasoning_gym", "regex")
}


def check_name(name: str) -> None:
    """Raises InvalidData unless `name` is built in or looks like an import path. Imports nothing."""
    module, colon, function = name.partition(":")
    if name in BUILT_IN or (colon and module and function.isidentifier()):
        return
    raise InvalidData(
        "unknown_scorer", f"reward.scorers: name is {name!r}, expected one of {sorted(BUILT_IN)}, or module:function"
    )


def load_scorer(settings: ScorerSettings) -> Scorer:
    """Raises InvalidData: unknown_scorer, scorer_import or scorer_options."""
    check_name(settings.name)
    if settings.name in BUILT_IN:
        return _build(settings)
    return user_scorer(_import_function(settings.name), settings)


def labels(scorers: Sequence[ScorerSettings]) -> list[str]:
    """One name for each scorer: a name that comes again gets a number, as in regex, regex_2."""
    seen: dict[str, int] = {}
    for settings in scorers:
        seen[settings.name] = seen.get(settings.name, 0) + 1
    taken: dict[str, int] = {}
    names = []
    for settings in scorers:
        taken[settings.name] = number = taken.get(settings.name, 0) + 1
        names.append(settings.name if number == 1 else f"{settings.name}_{number}")
    return names


def _build(settings: ScorerSettings) -> Scorer:
    build: Callable[..., Scorer] = importlib.import_module(BUILT_IN[settings.name]).build
    try:
        return build(**settings.options)
    except ValidationError as error:
        problems = "; ".join(_sentence(problem) for problem in error.errors())
        raise InvalidData("scorer_options", f"reward.scorers: options of {settings.name}: {problems}") from error


def _sentence(problem: Any) -> str:
    field = ".".join(str(part) for part in problem["loc"])
    if problem["type"] in {"unexpected_keyword_argument", "unexpected_positional_argument"}:
        return f"{field} is not a known option"
    return f"{field} is {problem['input']!r}: {problem['msg']}"


def _import_function(path: str) -> Callable[..., Any]:
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise InvalidData("scorer_import", f"reward.scorers: importing {module_name} failed ({error})") from error
        raise InvalidData("unknown_scorer", f"reward.scorers: there is no module {module_name!r} ({path})") from error
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise InvalidData("scorer_import", f"reward.scorers: importing {module_name} failed ({problem})") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise InvalidData("unknown_scorer", f"reward.scorers: module {module_name} has no function {name!r} ({path})")
    return function  # type: ignore[no-any-return]
