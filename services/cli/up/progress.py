"""How far a run has got, according to its directory."""

import json
from dataclasses import dataclass
from pathlib import Path

from services.common.config import Config
from services.common.run_files.run_log import RunLog


@dataclass(frozen=True)
class SavedStep:
    """A checkpoint: `saved_at` in seconds since 1970."""

    step: int
    saved_at: float
    path: Path


def newest_checkpoint(run: Path) -> SavedStep | None:
    found = [saved for path in (run / "checkpoints").glob("step-*") if (saved := _read(path)) is not None]
    return max(found, key=lambda saved: saved.step, default=None)


def is_finished(config: Config) -> bool:
    """Whether the last step has been trained, saved and evaluated."""
    saved = newest_checkpoint(config.run.path)
    if saved is None or saved.step < config.trainer.steps:
        return False
    return any(entry["step"] >= saved.step for entry in RunLog(config.run.path).evaluations())


def _read(path: Path) -> SavedStep | None:
    """None for what the trainer could not resume from either."""
    try:
        state = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
        return SavedStep(int(state["step"]), float(state["saved_at"]), path)
    except (OSError, ValueError, TypeError, KeyError):
        return None
