"""Processes that a command leaves behind, whatever they are called and whatever session they lead (Linux)."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
# What was killed a moment ago may still be on its way out.
SETTLE_SECONDS = 5.0


class Leftovers:
    """Within it, orphans of what this process starts become its children, so that none escapes."""

    def __enter__(self) -> "Leftovers":
        self._adopted = _adopts_orphans()
        _adopt_orphans(True)
        self._before = set(_descendants())
        return self

    def __exit__(self, *_: object) -> None:
        _adopt_orphans(self._adopted)

    def found(self) -> list[str]:
        """Command lines of those that still run, and did not when this was made."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (found := self._running()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return list(found.values())

    def _running(self) -> dict[int, str]:
        return {pid: command for pid, command in _descendants().items() if pid not in self._before}


def _adopt_orphans(wanted: bool) -> None:
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0) != 0:
        raise OSError("PR_SET_CHILD_SUBREAPER is refused")


def _adopts_orphans() -> bool:
    found = ctypes.c_int()
    if ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(found), 0, 0, 0) != 0:
        raise OSError("PR_GET_CHILD_SUBREAPER is refused")
    return bool(found.value)


def family(process: int) -> list[int]:
    """The process, then what it has started, then what that has started, and so on."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found = [process]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def kill(processes: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Some may be gone: a process may end with another."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants() -> dict[int, str]:
    """Process ids and command lines, zombies left out."""
    parents, commands = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":
            parents[int(entry.name)], commands[int(entry.name)] = int(parent), command
    found = {}
    for pid, command in commands.items():
        ancestor = parents.get(pid)
        while ancestor is not None and ancestor != os.getpid():
            ancestor = parents.get(ancestor)
        if ancestor is not None:
            found[pid] = command
    return found
