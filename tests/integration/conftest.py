import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.support.leftovers import Leftovers
from tests.support.trainer.ranks import make_models, run_workers

# Begins first: what takes longest.
FIRST = ("system", "up", "ranks", "sampler", "test_two_nodes")
RANKS = ("test_deepspeed_engine", "test_sharded_loading", "test_sharded_weights")


def group(nodeid: str) -> str:
    """What shares something that takes long to start: a folder, or the files of `ranks`."""
    name = nodeid.partition("::")[0].partition("tests/integration/")[2].split("/")[0].removesuffix(".py")
    return "ranks" if name in RANKS else name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        name = group(item.nodeid)
        return FIRST.index(name) if name in FIRST else len(FIRST)

    items.sort(key=place)


class ByGroup(LoadScopeScheduling):
    """A worker takes a whole group."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByGroup:
    return ByGroup(config, log)


@pytest.fixture(scope="session")
def quickstart_model(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The quickstart's model and data, made once for all workers, with little warm-up."""
    from examples.quickstart.__main__ import Sizes, build
    from examples.quickstart.warmup import WarmupSettings

    own = tmp_path_factory.getbasetemp()
    directory = (own if worker_id == "master" else own.parent) / "quickstart"
    directory.mkdir(exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "model").exists():
            sizes = Sizes(train=256, validation=16, probe=16)
            build(directory / "staging", 1, WarmupSettings(most_steps=20), sizes=sizes)
            (directory / "staging").rename(directory / "model")
    return directory / "model"


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one DeepSpeed rank alone, and two, have left what they saw."""
    directory = tmp_path_factory.mktemp("ranks")
    make_models(directory)
    run_workers(directory)
    return directory


@pytest.fixture
def leftovers() -> Iterator[Leftovers]:
    """Of what the test starts."""
    with Leftovers() as found:
        yield found
