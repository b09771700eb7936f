"""Checkpoints: the engine's state, the policy as a Hugging Face directory, and the ledger, written atomically."""

import itertools
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from services.common.errors import InvalidData
from services.common.logs import get_logger
from services.common.run_files.atomic import write_atomically
from services.common.run_files.held_out import Best, Score, read_best, write_best
from services.trainer.metrics import counters

log = get_logger(__name__)

STATE_FILE = "trainer.json"
ENGINE_DIRECTORY = "engine"
POLICY_DIRECTORY = "policy"
NAME = re.compile(r"step-\d{6,}")
# Keys that cannot change between two starts of a run, and why.
FIXED = {
    "run.seed": "it orders the rows, and the prompt cursor would point at others",
    "data.shuffle": "it orders the rows, and the prompt cursor would point at others",
    "model.path": "the run began from other weights, which are also the reference unless reference.path names one",
}
REPLACED, DAMAGED = "replaced-", "damaged-"


@dataclass(frozen=True)
class TrainerState:
    """All that the trainer needs in addition to the engine's own state."""

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
    # By key: what must not change during the run. A checkpoint from before a key was written has none.
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedCheckpoint:
    path: Path
    state: TrainerState
    # Of every file but the state's own; None where none were taken.
    sums: Mapping[str, str] | None = None

    @property
    def engine(self) -> Path:
        return self.path / ENGINE_DIRECTORY

    @property
    def policy(self) -> Path:
        return self.path / POLICY_DIRECTORY


class Checkpoints:
    """Step directories below `directory`; the newest `keep` stay, and the one with the best score.

    A directory has its name only while it is whole: one that is written is called staging, one that another takes the
    place of is called replaced, and one that turned out to be damaged is called damaged and never removed.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory, self._keep = directory.absolute(), keep
        self._directory.mkdir(parents=True, exist_ok=True)

    def staging(self, step: int) -> Path:
        """The same path on every rank; `begin` makes it."""
        return self._directory / f"staging-{step:06d}"

    def begin(self, step: int) -> None:
        """Rank 0 only; clears what a crash left behind."""
        for left_behind in self._directory.glob("staging-*"):
            shutil.rmtree(left_behind) if left_behind.is_dir() else left_behind.unlink()
        self.staging(step).mkdir()

    def commit(self, step: int, state: TrainerState, sums: Mapping[str, str] | None = None) -> SavedCheckpoint:
        """Rank 0 only, after every rank has written its part. `sums` are of what they wrote."""
        staged, final = self.staging(step), self._directory / f"step-{step:06d}"
        _write_state(staged / STATE_FILE, state, sums)
        replaced = self._directory / f"{REPLACED}{final.name}"
        if final.exists():
            final.rename(replaced)
        staged.rename(final)
        if replaced.exists():
            shutil.rmtree(replaced)
        best = read_best(self._directory)
        for old in self.list()[: -self._keep]:
            if best is None or old.path != best.path:
                shutil.rmtree(old.path)
        return SavedCheckpoint(final, state, sums)

    def keep_best(self, score: Score) -> bool:
        """Rank 0 only: the checkpoint of that step stays until a better one is there. False where there is none."""
        path = self._directory / f"step-{score.step:06d}"
        if not path.is_dir():
            return False
        write_best(self._directory, Best(score.step, score.label, score.value, path))
        return True

    def best(self) -> Best | None:
        return read_best(self._directory)

    def recover(self) -> None:
        """Rank 0 only, before the first `latest`: undoes what a crash interrupted, and puts unreadable ones aside."""
        for replaced in self._directory.glob(f"{REPLACED}*"):
            final = self._directory / replaced.name.removeprefix(REPLACED)
            if final.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(final)
        for path in self._paths():
            try:
                read_checkpoint(path)
            except InvalidData as error:
                counters.CHECKPOINTS_DAMAGED.inc()
                log.warning("checkpoint is damaged: put aside", reason=str(error), kept=str(self.set_aside(path)))

    def set_aside(self, path: Path) -> Path:
        """Rank 0 only. Returns where it is kept."""
        aside = path.with_name(f"{DAMAGED}{path.name}")
        for number in itertools.count(2):
            if not aside.exists():
                break
            aside = path.with_name(f"{DAMAGED}{path.name}.{number}")
        return path.rename(aside)

    def damaged(self) -> Sequence[Path]:
        return sorted(self._directory.glob(f"{DAMAGED}*"), key=lambda path: (len(path.name), path.name))

    def list(self) -> "list[SavedCheckpoint]":
        """Oldest first, without those that cannot be read."""
        found = []
        for path in self._paths():
            try:
                found.append(read_checkpoint(path))
            except InvalidData as error:
                log.warning("checkpoint skipped", reason=str(error))
        return found

    def latest(self) -> SavedCheckpoint | None:
        saved = self.list()
        return saved[-1] if saved else None

    def _paths(self) -> Sequence[Path]:
        found = [path for path in self._directory.iterdir() if NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def read_checkpoint(path: str | Path) -> SavedCheckpoint:
    """Its state, without checking the rest. Raises InvalidData if it is not what was written."""
    file = Path(path) / STATE_FILE
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        digest, found = content.pop("digest", None), _digest(content)
        sums = content.pop("sums", None)
        state = TrainerState(**content)
    except (OSError, TypeError, ValueError, AttributeError) as error:
        raise InvalidData("checkpoint_corrupt", f"{file} is not a trainer state ({error})") from error
    if digest not in {None, found}:
        raise InvalidData("checkpoint_corrupt", f"{file} is damaged: its digest is not {digest}")
    return SavedCheckpoint(Path(path), state, sums)


def _write_state(path: Path, state: TrainerState, sums: Mapping[str, str] | None) -> None:
    content = {**asdict(state), "sums": sums}
    content["digest"] = _digest(content)
    write_atomically(path, json.dumps(content, indent=1))


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def check_resumable(
    saved: SavedCheckpoint, *, model: str, data: str, world_size: int, settings: Mapping[str, str]
) -> None:
    """Raises InvalidData for a checkpoint of another model, other data or another of the settings that cannot change.

    Any number of ranks may resume it.
    """
    for name, found, expected, remedy in (
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
                "checkpoint_mismatch", f"checkpoint {saved.path} has {name} {found}, expected {expected}: {remedy}"
            )
    for key, expected in settings.items():
        found = saved.state.settings.get(key, expected)
        if found != expected:
            raise InvalidData(
                "checkpoint_mismatch",
                f"{key} is {expected}, expected {found} as in checkpoint {saved.path}: {FIXED[key]}, so give it the "
                "old value, or run.name a new one",
            )
    if saved.state.world_size != world_size:
        log.info("checkpoint of another number of ranks", saved=saved.state.world_size, now=world_size)


def size_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
