"""A user's own function as a scorer: its signature is checked as it is loaded, what it returns becomes Python's own."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from decimal import Decimal
from functools import partial
from typing import Any

from services.common.errors import InvalidData
from services.reward.scorers.types import Metadata, Scorer, ScorerSettings, deterministic, is_deterministic

PARAMETERS = ("prompt", "completion", "metadata")


def user_scorer(function: Callable[..., Any], settings: ScorerSettings) -> Scorer:
    """Calls `function` with (prompt, completion, metadata) and the options, and awaits what has to be awaited.

    Raises InvalidData("scorer_options") for a function that cannot be called so.
    """
    _check_signature(function, settings)
    bound = partial(function, **settings.options)
    # One event loop for all samples of a process: clients that a scorer keeps between calls belong to their loop.
    runner = asyncio.Runner()

    def score(prompt: str, completion: str, metadata: Metadata) -> Any:
        value = bound(prompt, completion, metadata)
        return _plain(runner.run(_awaited(value)) if inspect.isawaitable(value) else value)

    scorer: Scorer = score
    return deterministic(scorer) if is_deterministic(function) else scorer


def _check_signature(function: Callable[..., Any], settings: ScorerSettings) -> None:
    expected = f"({', '.join(PARAMETERS)}) and options as keywords"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise _unusable(settings, f"expected a function with the parameters {expected}: it has no signature") from error
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise _unusable(settings, "expected a function that returns a number: it is a generator")
    try:
        bound = signature.bind(*PARAMETERS, **settings.options)
    except TypeError as error:
        raise _unusable(
            settings,
            f"expected a function with the parameters {expected}; options are {sorted(settings.options)} ({error})",
        ) from error
    for name, value in bound.arguments.items():
        parameter = signature.parameters[name]
        positional = parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}
        # The value is the name that is expected there; one that is not used may begin with an underscore.
        if positional and value in PARAMETERS and name not in settings.options and name.lstrip("_") != value:
            raise _unusable(
                settings,
                f"its parameters are {signature}, expected {expected}: where {value} is expected stands {name}",
            )


def _unusable(settings: ScorerSettings, problem: str) -> InvalidData:
    return InvalidData("scorer_options", f"reward.scorers: {settings.name} cannot be used: {problem}")


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _plain(value: Any) -> Any:
    """A Decimal, or a scalar of NumPy or torch, as Python's number; anything else as it is."""
    if isinstance(value, Decimal):
        return float(value)
    item = getattr(value, "item", None)
    if not callable(item):
        return value
    try:
        return item()
    except (TypeError, ValueError, RuntimeError):
        # Several numbers in one: no reward.
        return value
