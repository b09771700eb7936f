"""What a run leaves to be read: one JSON line for each step and each evaluation."""

import json
from pathlib import Path
from typing import Any


class Records:
    """Append-only. A step trained again after a resume has a second line: the last one of a step holds."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._steps, self._evaluations = directory / "steps.jsonl", directory / "evaluations.jsonl"

    def add_step(self, record: dict[str, Any]) -> None:
        _append(self._steps, record)

    def add_evaluation(self, record: dict[str, Any]) -> None:
        _append(self._evaluations, record)

    def steps(self) -> list[dict[str, Any]]:
        """In order, each step once."""
        return _latest(self._steps)

    def evaluations(self) -> list[dict[str, Any]]:
        return _latest(self._evaluations)


def _append(path: Path, record: dict[str, Any]) -> None:
    # One write of a whole line: a reader never sees half of one.
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, sort_keys=True) + "\n")


def _latest(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    by_step: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        # A resume from step s makes void whatever came after s.
        by_step = {step: kept for step, kept in by_step.items() if step < record["step"]}
        by_step[record["step"]] = record
    return [by_step[step] for step in sorted(by_step)]
