"""The shapes that signatures state (jaxtyping) are checked at each call."""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import isclass
from pathlib import Path
from types import FunctionType
from typing import Any, get_args

import jaxtyping
from beartype import beartype
from jaxtyping import AbstractArray

ROOT = Path(__file__).parents[2]
# By name, every module that states shapes.
CHECKED = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("services", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if "from jaxtyping import" in path.read_text(encoding="utf-8")
)


def checked(function: FunctionType) -> FunctionType:
    """With its shapes checked, and no other type: those are mypy's, and a fake need not be a subclass."""
    hints = function.__annotations__
    result = hints.get("return", Any)
    # jaxtyping checks the arguments before a call, with Any as the result, and both after it.
    if result is not Any and not _has_shape(result):
        return function
    function.__annotations__ = {name: hint if _has_shape(hint) else Any for name, hint in hints.items()}
    return beartype(function)


def _has_shape(hint: Any) -> bool:
    return (isclass(hint) and issubclass(hint, AbstractArray)) or any(map(_has_shape, get_args(hint)))


def check_shapes() -> None:
    """To be called before any of these modules is imported."""
    jaxtyping.install_import_hook(CHECKED, f"{__name__}.checked")


@contextmanager
def unchecked() -> Iterator[None]:
    """For input that contradicts a signature on purpose, so that the code's own error is seen."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
