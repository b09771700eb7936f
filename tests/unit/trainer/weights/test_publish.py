"""What becomes of a version: to disk, from memory, or both, and what every rank does for it."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from services.common.config import WeightsConfig
from services.common.transport.outages import Outages
from services.common.transport.weight_feed import WeightFeed, verify_weights
from services.trainer.export.tensors import WeightSource
from services.trainer.weights.publish import Publication, Publisher, Release

EVERY = 4


class Ranks:
    """Rank 0 and one more, in step: what the first broadcasts is what the second gets."""

    def __init__(self):
        self.sent, self.exports = [], {0: [], 1: []}

    def engine(self, rank):
        return Rank(self, rank)


class Rank:
    def __init__(self, ranks, rank):
        self._ranks, self.rank = ranks, rank

    def broadcast_bytes(self, data):
        if self.rank == 0:
            self._ranks.sent.append(data)
            return data
        assert data is None
        return self._ranks.sent.pop(0)

    def export(self, directory):
        self._ranks.exports[self.rank].append(directory)
        if self.rank == 0:
            directory.mkdir()
            version = len(self._ranks.exports[0])
            save_file({"w": torch.full((2,), float(version))}, directory / "model.safetensors")


class FakeTransfer:
    def __init__(self):
        self.covers = self.sends = True
        self.group = ["r0"]
        self.sent = []

    def prepare(self):
        return self.covers

    def send(self, weights, tensors):
        self.sent.append((weights.version, weights.fingerprint, weights.path, [name for name, _ in tensors]))
        return self.sends

    def close(self): ...


class CountingSource(WeightSource):
    gathered = 0

    def gather(self):
        self.gathered += 1


@pytest.fixture
def transfer():
    return FakeTransfer()


@pytest.fixture
def feed(redis_client):
    return WeightFeed(redis_client, "publication")


@pytest.fixture
def source():
    return CountingSource(nn.Linear(2, 2), None)


class Run:
    def __init__(self, tmp_path, feed, source, transfer):
        self.ranks, self.source = Ranks(), source
        self._publisher = Publisher(tmp_path / "weights", feed, 4, Outages(60.0))
        release = Release(self._publisher, WeightsConfig(disk_every=EVERY), transfer)
        self._lead = Publication(self.ranks.engine(0), source, release)
        self._other = Publication(self.ranks.engine(1), source, None)

    def publish(self, version, *, durable=False):
        """How often the version was exported."""
        before = len(self.ranks.exports[0])
        self._lead.publish(version, durable=durable)
        self._other.publish(version, durable=durable)
        assert self.ranks.sent == []
        assert self.ranks.exports[0] == self.ranks.exports[1]
        return len(self.ranks.exports[0]) - before


@pytest.fixture
def run(tmp_path, feed, source, transfer):
    return Run(tmp_path, feed, source, transfer)


def announced(feed):
    return feed.latest()[1]


def test_without_a_transfer_every_version_goes_to_disk(tmp_path, feed):
    run = Run(tmp_path, feed, None, None)
    for version in range(3):
        assert run.publish(version) == 1
        assert announced(feed).version == version
        verify_weights(announced(feed))


def test_a_version_published_again_is_kept_where_it_is_whole_and_written_again_where_it_is_damaged(tmp_path, feed):
    publisher = Publisher(tmp_path / "weights", feed, 4, Outages(60.0))

    def stored():
        staged = publisher.staging()
        staged.mkdir()
        save_file({"w": torch.ones(2)}, staged / "model.safetensors")
        return publisher.store(staged, 3)

    first = stored()
    verify_weights(stored())
    assert stored().path == first.path
    (tmp_path / "weights" / first.path / "model.safetensors").write_bytes(b"")
    verify_weights(stored())
    assert [path.name for path in (tmp_path / "weights").iterdir()] == [first.path.rpartition("/")[2]]


def test_the_first_version_some_others_and_durable_ones_go_to_disk_too(run, feed, transfer, source):
    exported = [version for version in range(5, 15) if run.publish(version, durable=version == 10)]
    assert exported == [5, 8, 10, 12]
    assert [version for version, *_ in transfer.sent] == list(range(5, 15))
    assert source.gathered == 10
    assert announced(feed).version == 14
    assert announced(feed).path == ""
    assert feed.latest_on_disk()[1].version == 12


def test_a_version_that_is_on_disk_has_one_name(run, feed, transfer):
    run.publish(0)
    on_disk = announced(feed)
    verify_weights(on_disk)
    assert transfer.sent == [(0, on_disk.fingerprint, on_disk.path, ["weight", "bias"])]


def test_a_version_from_memory_has_a_name_of_its_own(run, tmp_path, feed, source):
    run.publish(0)
    names = []
    for version in (1, 2):
        run.publish(version)
        names.append(announced(feed).fingerprint)
    # The trainer is started again, and comes to the same versions on another way.
    again = Run(tmp_path / "again", feed, source, FakeTransfer())
    again.publish(0)
    for version in (1, 2):
        again.publish(version)
        names.append(announced(feed).fingerprint)
    assert len(set(names)) == 4
    assert all(len(name) == 16 for name in names)


def test_nobody_misses_a_version(run, feed, transfer):
    """One that fails goes to disk after it, under the name of its files: whoever has it already loads them."""
    run.publish(0)
    transfer.sends = False
    assert run.publish(1) == 1
    verify_weights(announced(feed))
    assert transfer.sent[-1][1] != announced(feed).fingerprint
    transfer.sends = True
    assert run.publish(2) == 0


def test_with_a_rollout_outside_the_group_versions_go_to_disk_before(run, feed, transfer):
    run.publish(0)
    transfer.covers = False
    assert run.publish(1) == 1
    assert transfer.sent[-1][1] == announced(feed).fingerprint
    # Also when it then fails: once is enough.
    transfer.sends = False
    assert run.publish(2) == 1
    verify_weights(announced(feed))


def test_without_any_rollout_nothing_is_gathered(run, transfer, source):
    transfer.covers, transfer.group = False, []
    assert run.publish(0) == 1
    assert run.publish(1) == 1
    assert transfer.sent == []
    assert source.gathered == 0
