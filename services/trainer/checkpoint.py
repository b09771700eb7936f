"""Checkpoints: the engine's state, the policy as a Hugging Face directory, and the ledger, whole or not at all."""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.common.errors import InvalidData
from services.common.logs import get_logger

log = get_logger(__name__)

STATE_FILE = "trainer.json"
ENGINE_DIRECTORY = "engine"
POLICY_DIRECTORY = "policy"


@dataclass(frozen=True)
class TrainerState:
    """All that the trainer needs beside the engine's own state."""

    step: int
    # The first part of every group id.
    history: str
    # Digest of the model's parameter names and shapes.
    model: str
    data: str
    config: str
    world_size: int
    ledger: dict[str, Any]
    saved_at: float


@dataclass(frozen=True)
class SavedCheckpoint:
    path: Path
    state: TrainerState

    @property
    def engine(self) -> Path:
        return self.path / ENGINE_DIRECTORY

    @property
    def policy(self) -> Path:
        return self.path / POLICY_DIRECTORY


class Checkpoints:
    """Step directories below `directory`; the newest `keep` stay."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory, self._keep = directory.absolute(), keep
        self._directory.mkdir(parents=True, exist_ok=True)

    def staging(self, step: int) -> Path:
        """The same path on every rank; `begin` makes it."""
        return self._directory / f"staging-{step:06d}"

    def begin(self, step: int) -> None:
        """Rank 0 only; clears what a crash left behind."""
        for left_behind in self._directory.glob("staging-*"):
            shutil.rmtree(left_behind)
        self.staging(step).mkdir()

    def commit(self, step: int, state: TrainerState) -> SavedCheckpoint:
        """Rank 0 only, after every rank has written its part."""
        staged = self.staging(step)
        with (staged / STATE_FILE).open("w", encoding="utf-8") as file:
            json.dump(asdict(state), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        final = self._directory / f"step-{step:06d}"
        if final.exists():
            shutil.rmtree(final)
        staged.rename(final)
        for old in self.list()[: -self._keep]:
            shutil.rmtree(old.path)
        return SavedCheckpoint(final, state)

    def list(self) -> "list[SavedCheckpoint]":
        """Oldest first."""
        return [_read(path) for path in sorted(self._directory.glob("step-*")) if (path / STATE_FILE).exists()]

    def latest(self) -> SavedCheckpoint | None:
        saved = self.list()
        return saved[-1] if saved else None


def _read(path: Path) -> SavedCheckpoint:
    try:
        state = TrainerState(**json.loads((path / STATE_FILE).read_text(encoding="utf-8")))
    except (TypeError, json.JSONDecodeError) as error:
        raise InvalidData("checkpoint_corrupt", f"{path / STATE_FILE} is not a trainer state ({error})") from error
    return SavedCheckpoint(path, state)


def check_resumable(saved: SavedCheckpoint, *, model: str, data: str, world_size: int) -> None:
    """Raises InvalidData for a checkpoint of another model or other data. Any number of ranks may resume it."""
    for field, found, expected, remedy in (
        (
            "model",
            saved.state.model,
            model,
            "it belongs to another model: give run.name a new value or model.path the old one",
        ),
        ("data", saved.state.data, data, "the prompt cursor would point at other rows: give run.name a new value"),
    ):
        if found != expected:
            raise InvalidData(
                "checkpoint_mismatch", f"checkpoint {saved.path} has {field} {found}, expected {expected}: {remedy}"
            )
    if saved.state.world_size != world_size:
        log.info("checkpoint of another number of ranks", saved=saved.state.world_size, now=world_size)


def size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
