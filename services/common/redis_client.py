import redis
from redis.backoff import ExponentialBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, TimeoutError
from redis.retry import Retry

from services.common.config import ConfigError, RedisConfig

SOCKET_TIMEOUT_SECONDS = 10.0
# A blocking read has to answer before the socket gives up.
MAX_BLOCK_SECONDS = 5.0
RETRY_CAP_SECONDS = 0.5


def connect(config: RedisConfig) -> redis.Redis:
    """A client that rides out an unreachable server for `retry_seconds`, then raises redis' ConnectionError.

    Raises ConfigError without an address.
    """
    if config.url is None:
        raise ConfigError("redis.url is missing: a service on its own needs the address of the run's Redis")
    retries = max(1, round(config.retry_seconds / RETRY_CAP_SECONDS))
    return redis.Redis.from_url(
        config.url,
        socket_timeout=SOCKET_TIMEOUT_SECONDS,
        socket_connect_timeout=SOCKET_TIMEOUT_SECONDS,
        health_check_interval=30,
        retry=Retry(ExponentialBackoff(cap=RETRY_CAP_SECONDS, base=0.02), retries),
        retry_on_error=[BusyLoadingError, ConnectionError, TimeoutError],
    )
