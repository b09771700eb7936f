from pathlib import Path

import pytest

from tests.support.runs.interrupted_run import Run, interrupt_and_resume, write_configuration


@pytest.fixture(scope="session")
def config_file(quickstart_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_configuration(tmp_path_factory.mktemp("up"), quickstart_model)


@pytest.fixture(scope="session")
def run(config_file: Path) -> Run:
    return interrupt_and_resume(config_file)
