"""Algorithms by name, and a user's own by import path."""

from collections.abc import Callable
from importlib import import_module

from services.trainer.objective.algorithms.algorithm import Algorithm
from services.trainer.objective.algorithms.cispo import cispo
from services.trainer.objective.algorithms.dapo import dapo
from services.trainer.objective.algorithms.dpo import dpo
from services.trainer.objective.algorithms.dr_grpo import dr_grpo
from services.trainer.objective.algorithms.grpo import grpo
from services.trainer.objective.algorithms.gspo import gspo
from services.trainer.objective.algorithms.ppo import ppo
from services.trainer.objective.algorithms.preference import PreferenceAlgorithm

ALGORITHMS: dict[str, Callable[[], Algorithm | PreferenceAlgorithm]] = {
    "ppo": ppo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "dpo": dpo,
}


def find_algorithm(name: str) -> Algorithm | PreferenceAlgorithm:
    """The algorithm of that name, or what `module:function`, called without arguments, returns.

    Raises ValueError that lists the known names, or says what is wrong with the import path.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]()
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ValueError(f"algorithm.name is {name!r}, expected one of {', '.join(ALGORITHMS)}, or module:function")
    try:
        factory = getattr(import_module(module), function)
        found = factory() if callable(factory) else factory
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"algorithm.name is {name!r}, expected module:function that can be imported and called ({reason})"
        ) from error
    if not isinstance(found, Algorithm | PreferenceAlgorithm):
        raise ValueError(
            f"algorithm.name is {name!r}, expected a function that returns an Algorithm or PreferenceAlgorithm: "
            f"{found!r}"
        )
    return found
