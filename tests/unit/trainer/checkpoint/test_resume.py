"""Which checkpoint a start takes, with one rank and with two that share the directory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from services.common.errors import InvalidData
from services.trainer.checkpoint.checksums import sum_files
from services.trainer.checkpoint.directory import Checkpoints, TrainerState
from services.trainer.checkpoint.resume import take_up
from services.trainer.metrics import counters

FILES = ("engine/engine.json", "engine/optimizer-{rank}.pt", "policy/model.safetensors")


class Group:
    """What collectives are: every rank waits for the others."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=10)
        self.shared: dict[int, object] = {}


class Rank:
    def __init__(self, group: Group, rank: int, world_size: int) -> None:
        self._group, self.rank, self.world_size = group, rank, world_size
        self.loaded: list[str] = []

    def _gather(self, value: object) -> list[object]:
        self._group.shared[self.rank] = value
        self._group.barrier.wait()
        everyone = [self._group.shared[rank] for rank in range(self.world_size)]
        self._group.barrier.wait()
        return everyone

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        assert (data is None) == (self.rank != 0)
        return self._gather(data)[0]

    def all_reduce(self, values: torch.Tensor, operation: str) -> torch.Tensor:
        assert operation == "max"
        return torch.stack(self._gather(values)).amax(0)

    def barrier(self) -> None:
        self._gather(None)

    def load(self, directory: Path) -> None:
        content = (directory / "engine.json").read_text()
        if "digest of other values" in content:
            raise InvalidData("checkpoint_corrupt", f"{directory} holds other values than those that were saved")
        self.loaded.append(directory.parent.name)

    def finite(self) -> bool:
        return True


def together(ranks, call):
    """One thread a rank; the first rank's outcome."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        waiting = [pool.submit(call, rank) for rank in ranks]
        first, *_ = [each.result(20) for each in waiting]
        return first


def make_ranks(count):
    group = Group(count)
    return [Rank(group, rank, count) for rank in range(count)]


def state(step: int, ranks: int = 1) -> TrainerState:
    ledger = {"cursor": 4, "outstanding": {}, "withheld": {}, "lost": []}
    return TrainerState(
        step=step, history="h", model="m", data="d", config="c", world_size=ranks, ledger=ledger, saved_at=1.0
    )


def save(directory: Path, ranks, step: int, *, with_sums: bool = True) -> Path:
    checkpoints = Checkpoints(directory, keep=3)
    checkpoints.begin(step)
    staged = checkpoints.staging(step)
    for rank in ranks:
        for name in FILES:
            file = staged / name.format(rank=rank.rank)
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(f"step {step} {name} ".encode() * 500)
    sums = together(ranks, lambda rank: sum_files(staged, rank)) if with_sums else None
    return checkpoints.commit(step, state(step, len(ranks)), sums).path


def resume(directory: Path, ranks, fits=lambda saved: None):
    found = together(ranks, lambda rank: take_up(Checkpoints(directory, keep=3), rank, fits))
    assert len({tuple(rank.loaded) for rank in ranks}) == 1
    return found.state.step if found else None


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("damage", [emptied, truncated, flipped, Path.unlink])
@pytest.mark.parametrize(
    "file", ["trainer.json", "engine/engine.json", "engine/optimizer-0.pt", "policy/model.safetensors"]
)
def test_a_damaged_newest_is_put_aside_and_the_one_before_is_taken(tmp_path, ranks, damage, file):
    ranks = make_ranks(ranks)
    for step in (2, 4):
        save(tmp_path, ranks, step)
    damage(tmp_path / "step-000004" / file)
    before = counters.CHECKPOINTS_DAMAGED._value.get()
    assert resume(tmp_path, ranks) == 2
    assert [rank.loaded for rank in ranks] == [["step-000002"]] * len(ranks)
    assert names(tmp_path) == ["damaged-step-000004", "step-000002"]
    assert counters.CHECKPOINTS_DAMAGED._value.get() == before + 1
    # Saved again, and damaged again: nothing of what was put aside is lost.
    save(tmp_path, ranks, 4)
    damage(tmp_path / "step-000004" / file)
    assert resume(tmp_path, ranks) == 2
    assert names(tmp_path) == ["damaged-step-000004", "damaged-step-000004.2", "step-000002"]


@pytest.mark.parametrize("damage", [emptied, truncated, flipped, Path.unlink])
@pytest.mark.parametrize("file", ["trainer.json", "engine/engine.json"])
def test_a_damaged_old_one_does_not_keep_the_run_from_resuming(tmp_path, damage, file):
    ranks = make_ranks(1)
    for step in (2, 4):
        save(tmp_path, ranks, step)
    damage(tmp_path / "step-000002" / file)
    assert resume(tmp_path, ranks) == 4
    assert [saved.state.step for saved in Checkpoints(tmp_path, keep=3).list()][-1] == 4


def test_a_run_whose_every_checkpoint_is_damaged_does_not_begin_anew_in_silence(tmp_path):
    ranks = make_ranks(2)
    for step in (2, 10):
        save(tmp_path, ranks, step)
        flipped(tmp_path / f"step-{step:06d}" / "policy" / "model.safetensors")
    for _ in range(2):
        with pytest.raises(InvalidData, match=r"every checkpoint .*/damaged-step-000010.* --fresh"):
            resume(tmp_path, ranks)
    assert names(tmp_path) == ["damaged-step-000002", "damaged-step-000010"]


def test_a_run_without_checkpoints_begins(tmp_path):
    assert resume(tmp_path, make_ranks(2)) is None


def test_one_that_belongs_to_something_else_is_refused_not_put_aside(tmp_path):
    def fits(saved):
        raise InvalidData("checkpoint_mismatch", "another model")

    ranks = make_ranks(1)
    save(tmp_path, ranks, 2)
    with pytest.raises(InvalidData, match="another model"):
        resume(tmp_path, ranks, fits)
    assert names(tmp_path) == ["step-000002"]


def test_one_from_before_there_were_sums_is_taken_and_its_damage_found_where_it_shows(tmp_path):
    ranks = make_ranks(1)
    for step in (2, 4, 6):
        save(tmp_path, ranks, step, with_sums=False)
        torch.save({"step": torch.arange(1000)}, tmp_path / f"step-{step:06d}" / "engine" / "optimizer-0.pt")
    flipped(tmp_path / "step-000006" / "engine" / "optimizer-0.pt")
    (tmp_path / "step-000004" / "engine" / "engine.json").write_text("digest of other values")
    assert resume(tmp_path, ranks) == 2
    assert names(tmp_path) == ["damaged-step-000004", "damaged-step-000006", "step-000002"]


def test_sums_of_all_ranks_cover_every_file_and_leave_nothing_behind(tmp_path):
    ranks = make_ranks(2)
    path = save(tmp_path, ranks, 2)
    (saved,) = Checkpoints(tmp_path, keep=3).list()
    found = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert saved.sums.keys() == found - {"trainer.json"}
    assert names(tmp_path) == ["step-000002"]
