import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli.shared.processes import free_port
from tests.containers.bases import make_bases
from tests.containers.deployment import Deployment, deployed
from tests.containers.engine import Engine


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    assert os.geteuid() == 0, "an engine of its own needs root"
    engine = Engine(tmp_path_factory.mktemp("engine"))
    try:
        engine.start()
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="session")
def deployment(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Images built, nothing started yet."""
    directory: Path = tmp_path_factory.mktemp("deployment")
    settings = {
        "TRAINER_PORT": str(free_port()),
        "PROMETHEUS_PORT": str(free_port()),
        "ALERTMANAGER_PORT": str(free_port()),
        # More than will be trained: it must not end while it is being disturbed.
        "TRIVET__TRAINER__STEPS": "5000",
        "TRIVET__TRAINER__CHECKPOINT_EVERY": "5",
        "TRIVET__EVALUATION__EVERY": "50",
    }
    with deployed(engine, directory, settings) as deployment:
        services = deployment.project()["services"]
        images = {name: services[name]["image"] for name in ("redis", "prometheus", "alertmanager")}
        images["python"] = _base_of("reward.Dockerfile")
        make_bases(engine, tmp_path_factory.mktemp("bases"), images)
        deployment.build()
        yield deployment


def _base_of(dockerfile: str) -> str:
    path = Path(__file__).resolve().parents[2] / "deploy/docker" / dockerfile
    return next(
        line.removeprefix("ARG BASE=") for line in path.read_text().splitlines() if line.startswith("ARG BASE=")
    )
