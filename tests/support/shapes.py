"""The shapes that jaxtyping states in signatures are checked at each call, in the packages listed here."""

from collections.abc import Iterator
from contextlib import contextmanager

import jaxtyping
from beartype import BeartypeConf, beartype

# By the name of a package: all modules in it.
CHECKED = ("services.trainer.objective",)

# The numeric tower of PEP 484, as mypy has it: an int is a float too.
checked = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check_shapes() -> None:
    """To be called before anything of these packages is imported."""
    jaxtyping.install_import_hook(CHECKED, f"{__name__}.checked")


@contextmanager
def unchecked() -> Iterator[None]:
    """For input that contradicts a signature on purpose, so that the code's own error is seen."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
