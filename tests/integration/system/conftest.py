from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs.disturbed_run import Finished, disturb, disturbable


@pytest.fixture(scope="session")
def finished(quickstart_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    system = disturbable(tmp_path_factory.mktemp("system"), quickstart_model)
    try:
        yield disturb(system)
    finally:
        system.stop()
