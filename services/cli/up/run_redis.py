"""The Redis of a run, seen by its supervisor: one that it starts itself, or that of redis.url."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from services.cli.shared.processes import ServiceProcess, free_port
from services.cli.shared.restarts import RestartBudget
from services.common.config import Config
from services.common.secrets import without_secrets

START_SECONDS = 20.0
STOP_SECONDS = 2.0


@dataclass(frozen=True)
class RedisProblem:
    """`final` when waiting does not help."""

    sentence: str
    final: bool = False


@dataclass(frozen=True)
class RedisEnding:
    reason: str
    log: Path
    started_again: bool


class RunRedis:
    def __init__(self, config: Config, lock: int | None, restarts: RestartBudget) -> None:
        self._process: ServiceProcess | None = None
        self.is_external = config.redis.url is not None
        # How long it may take to answer.
        self.patience = config.redis.retry_seconds if self.is_external else START_SECONDS
        if config.redis.url is not None:
            self.url = config.redis.url
            return
        self._directory = config.run.path / "redis"
        port = free_port()
        self.url = f"redis://127.0.0.1:{port}/0"
        arguments = ["--directory", str(self._directory), "--port", str(port)]
        self._process = ServiceProcess(
            "redis",
            [sys.executable, "-m", "services.cli.up.redis_server", *arguments],
            config.run.path / "logs" / "redis.log",
            restarts=restarts,
            lock=lock,
        )

    @property
    def shown_address(self) -> str:
        return without_secrets(self.url)

    def start(self) -> None:
        if self._process is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._process.start()

    def client(self) -> redis.Redis:
        """One that gives up at once: what it reads is for display only."""
        return redis.Redis.from_url(self.url, socket_timeout=1.0, retry=Retry(ConstantBackoff(0.0), 0))

    def answers(self) -> bool:
        return self.problem() is None

    def problem(self) -> RedisProblem | None:
        """Why it cannot be used; None when it answers."""
        where = f"{self.shown_address} (redis.url)" if self.is_external else self.shown_address
        if self._process is not None and self._process.exit_code() is not None:
            reason = self._process.ending().reason
            return RedisProblem(f"Redis does not start: {reason}\nits log is {self._process.log}", final=True)
        try:
            with self.client() as client:
                client.ping()
        except redis.exceptions.AuthenticationError as error:
            return RedisProblem(f"Redis at {where} refuses the user or the password ({error})", final=True)
        except redis.exceptions.RedisError as error:
            return RedisProblem(f"Redis at {where} does not answer ({type(error).__name__})")
        return None

    def keep_up(self) -> RedisEnding | None:
        """Restarts what has ended; None when there was nothing to do."""
        if self._process is None or self._process.exit_code() is None:
            return None
        reason = self._process.ending().reason
        return RedisEnding(reason, self._process.log, self._process.restart())

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(time.monotonic() + STOP_SECONDS)
