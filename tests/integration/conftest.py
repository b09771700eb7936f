from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.leftovers import Leftovers


@pytest.fixture(scope="session")
def quickstart_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model and data, made once for all tests, with little warm-up."""
    from examples.quickstart.__main__ import Sizes, build
    from examples.quickstart.warmup import WarmupSettings

    directory = tmp_path_factory.mktemp("quickstart") / "model"
    build(directory, 1, WarmupSettings(most_steps=20), sizes=Sizes(train=256, validation=16, probe=16))
    return directory


@pytest.fixture
def leftovers() -> Iterator[Leftovers]:
    """Of what the test starts."""
    with Leftovers() as found:
        yield found
