"""The run's Redis. What redis-py raises when the server cannot serve becomes Unavailable here, and only here."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import ExponentialBackoff
from redis.client import Pipeline
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry

from services.common.config import ConfigError, RedisConfig
from services.common.errors import Outage, Unreachable

SOCKET_TIMEOUT_SECONDS = 10.0
# A blocking read has to answer before the socket gives up.
MAX_BLOCK_SECONDS = 5.0
RETRY_CAP_SECONDS = 0.5

_OUTAGES: dict[type[Exception], tuple[str, str]] = {
    OutOfMemoryError: ("redis_memory", "Redis is at its maxmemory and takes nothing more"),
    ReadOnlyError: ("redis_readonly", "Redis is a replica that takes no writes"),
    BusyLoadingError: ("redis_loading", "Redis is loading its data"),
}


def connect(config: RedisConfig) -> redis.Redis:
    """A client that rides out an unreachable server for `retry_seconds`, then raises Unreachable.

    A server that answers and cannot serve is an Outage. Raises ConfigError without an address.
    """
    if config.url is None:
        raise ConfigError("redis.url is missing: a service on its own needs the address of the run's Redis")
    retries = max(1, round(config.retry_seconds / RETRY_CAP_SECONDS))
    return _Client.from_url(
        config.url,
        socket_timeout=SOCKET_TIMEOUT_SECONDS,
        socket_connect_timeout=SOCKET_TIMEOUT_SECONDS,
        health_check_interval=30,
        retry=Retry(ExponentialBackoff(cap=RETRY_CAP_SECONDS, base=0.02), retries),
        retry_on_error=[BusyLoadingError, ConnectionError, TimeoutError],
    )


def local_address(client: redis.Redis) -> str:
    """From which this machine reaches the server."""
    with _naming():
        connection: Any = client.connection_pool.get_connection()
    try:
        name = connection._sock.getsockname()
    finally:
        client.connection_pool.release(connection)
    # A Unix socket's peer is on this machine.
    return str(name[0]) if isinstance(name, tuple) else "127.0.0.1"


class _Client(redis.Redis):
    def execute_command(self, *args: Any, **options: Any) -> Any:
        with _naming():
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        return _Pipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class _Pipeline(Pipeline):
    def execute(self, raise_on_error: bool = True) -> list[Any]:
        with _naming():
            return super().execute(raise_on_error)


@contextmanager
def _naming() -> Iterator[None]:
    try:
        yield
    except AuthenticationError:
        # A wrong password, which redis-py counts among the broken connections.
        raise
    except tuple(_OUTAGES) as error:
        code, words = next(_OUTAGES[kind] for kind in _OUTAGES if isinstance(error, kind))
        raise Outage(code, f"{words} ({error})") from error
    except (ConnectionError, TimeoutError) as error:
        raise Unreachable("redis_unreachable", f"Redis does not answer ({error})") from error
    except ResponseError as error:
        if "MISCONF" in str(error):
            raise Outage("redis_disk", f"Redis cannot write to its disk ({error})") from error
        raise
