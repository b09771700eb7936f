"""One `trivet up` at a time in a run's directory."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_FILE = "lock"


class RunTaken(Exception):
    """Another `trivet up`, or what one left behind, is at work in the directory; the message says which processes."""


@contextmanager
def run_lock(directory: Path) -> Iterator[int]:
    """Holds <directory>/lock and yields its file descriptor. Raises RunTaken.

    The kernel lets go of it when the last process that has inherited the descriptor ends: services that outlive a
    killed `trivet up` still hold it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK_FILE
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise RunTaken(_sentence(directory, file.read().strip(), _holders(path))) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield file.fileno()


def refuse_taken(directory: Path) -> None:
    """Raises RunTaken where it is; makes nothing."""
    if (directory / LOCK_FILE).exists():
        with run_lock(directory):
            return


def _sentence(directory: Path, owner: str, holders: list[int]) -> str:
    if owner.isdecimal() and holders and int(owner) not in holders:
        pids = " ".join(map(str, holders))
        return (
            f"{directory} is still in use by processes that an ended `trivet up` left behind: "
            f"end them first (kill {pids})"
        )
    return (
        f"{directory} is in use by another `trivet up` (process {owner or 'unknown'}): "
        "wait for it or stop it, or give this run another run.name"
    )


def _holders(path: Path) -> list[int]:
    """The other processes that have the file open, as far as /proc shows them."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) == str(path.absolute()):
                found.add(int(link.parts[2]))
        except OSError:
            continue
    return sorted(found - {os.getpid()})
