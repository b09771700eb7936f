"""What a run leaves to be read: one JSON line for each step and each evaluation."""

import errno
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from services.common.logs import get_logger
from services.common.strict_json import strict

Number = TypeVar("Number")
log = get_logger(__name__)

# A step metric: steps in a row, up to this one, whose rewards did not distinguish between answers.
STEPS_WITHOUT_SIGNAL = "steps_without_signal"
# From so many on a run's learning is in doubt.
WARNED_AFTER_STEPS = 5

# Step metrics in lines and records written before they had the name of their Prometheus metric.
_QUANTILES = ("", "_min", "_p1", "_p50", "_p99", "_p999", "_max")
_RENAMED = {
    **{
        f"{first}ratio{quantile}": f"{first}policy_ratio{quantile}"
        for first in ("", "first_")
        for quantile in _QUANTILES
    },
    "candidates_mean": "candidate_set_size",
    "pairs": "preference_pairs",
    "truncated_ratio": "truncated_fraction",
    "record_seconds": "recording_seconds",
}
# masked_fraction says the same.
_REMOVED = frozenset({"masked_sequence_ratio"})

# What a step's first optimizer step says of itself, where there are several.
FIRST = "first_"


def before_updates(metrics: Mapping[str, float]) -> dict[str, float]:
    """With what compares sampler and trainer as it was before any update of the step, under the plain names."""
    first = {name.removeprefix(FIRST): value for name, value in metrics.items() if name.startswith(FIRST)}
    return {**metrics, **first}


def renamed(metrics: Mapping[str, Number]) -> dict[str, Number]:
    """Step metrics by the names of today."""
    return {_RENAMED.get(name, name): value for name, value in metrics.items() if name not in _REMOVED}


class RunLog:
    """Append-only. A step trained again after a resume has a second line: the last one of a step holds.

    A metric that is not finite is null in its line, and is left out of what is read.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._steps, self._evaluations = directory / "steps.jsonl", directory / "evaluations.jsonl"

    def add_step(self, entry: dict[str, Any]) -> None:
        _append(self._steps, entry)

    def add_evaluation(self, entry: dict[str, Any]) -> None:
        _append(self._evaluations, entry)

    def steps(self) -> list[dict[str, Any]]:
        """In order, each step once."""
        return _latest(self._steps)

    def evaluations(self) -> list[dict[str, Any]]:
        return _latest(self._evaluations)


def _append(path: Path, entry: dict[str, Any]) -> None:
    """Atomically, even where the disk is full. Raises OSError."""
    line = (json.dumps(strict(entry), sort_keys=True, allow_nan=False) + "\n").encode()
    # Unbuffered: closing a file writes what a failed flush has left in its buffer.
    with path.open("ab", buffering=0) as file:
        _mend_end(path)
        end = path.stat().st_size
        try:
            written = file.write(line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            os.truncate(path, end)
            raise


def _mend_end(path: Path) -> None:
    """What a crash or a full disk cut off must not run into what comes next."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1))
        if file.read() in {b"", b"\n"}:
            return
    content = path.read_bytes()
    begin = content.rfind(b"\n") + 1
    if _parse(content[begin:].decode(errors="replace")) is not None:
        with path.open("ab") as file:
            file.write(b"\n")
        return
    log.warning("a line that was cut off is taken out", file=str(path), bytes=len(content) - begin)
    os.truncate(path, begin)


def _latest(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    by_step: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), start=1):
        if not line:
            continue
        entry = _parse(line)
        if entry is None:
            log.warning("a damaged line is skipped", file=str(path), line=number)
            continue
        entry["metrics"] = _finite(renamed(entry["metrics"]))
        # Resuming from step s voids everything after s.
        by_step = {step: kept for step, kept in by_step.items() if step < entry["step"]}
        by_step[entry["step"]] = entry
    return [by_step[step] for step in sorted(by_step)]


def _finite(metrics: dict[str, float | None]) -> dict[str, float]:
    """Lines of earlier versions may hold NaN."""
    return {name: value for name, value in metrics.items() if value is not None and math.isfinite(value)}


def _parse(line: str) -> dict[str, Any] | None:
    """The entry at the end of the line, where a complete one follows one that was cut off; None if there is none."""
    begin = line.find("{")
    while begin >= 0:
        try:
            entry = json.loads(line[begin:])
        except json.JSONDecodeError:
            entry = None
        if isinstance(entry, dict) and type(entry.get("step")) is int and isinstance(entry.get("metrics"), dict):
            return entry
        begin = line.find("{", begin + 1)
    return None
