"""The packages of the images: what their lists name, and what those need in turn."""

from importlib.metadata import distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.deploy.compose_file import ROOT

# What the lock is resolved for: `make lock` names the minor version, and the resolver takes its first release.
PYTHON = {"python_full_version": "3.11.0", "python_version": "3.11"}
# Torch comes first and by itself, or with the base image; the others are left out (requirements/overrides.txt).
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "triton"}


def pins(path: Path) -> dict[str, str]:
    """Name to version of a list made by `make lock`."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def wanted(path: Path) -> list[Requirement]:
    """What an .in file asks for, its includes too."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("-r "):
            found += wanted(path.parent / line.removeprefix("-r "))
        elif line and not line.startswith("#"):
            found.append(Requirement(line))
    return found


def closure(requirements: list[Requirement]) -> set[str]:
    """The names of everything that these need, as the installed packages declare it."""
    seen: set[tuple[str, str]] = set()
    left = [(canonicalize_name(each.name), extra) for each in requirements for extra in ("", *each.extras)]
    while left:
        name, extra = left.pop()
        if name in LEFT_OUT or (name, extra) in seen:
            continue
        seen.add((name, extra))
        for text in distribution(name).requires or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({**PYTHON, "extra": extra}):
                left += [(canonicalize_name(needed.name), each) for each in ("", *needed.extras)]
    return {name for name, _ in seen}


def foreign_modules(allowed: set[str]) -> list[str]:
    """Top-level modules of installed packages that are not among `allowed`."""
    return sorted(
        module
        for module, owners in packages_distributions().items()
        if not {canonicalize_name(owner) for owner in owners} & allowed
    )


def lists() -> Path:
    return ROOT / "requirements"
