"""`trivet up`: Redis, rollouts, rewards and trainer as separate processes of one machine.

A run that learns from preferences of a file needs the trainer alone.
"""

import sys
import threading
import time
from pathlib import Path

import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from services.cli.processes import ServiceProcess, free_port
from services.common.config import Config
from services.common.exit_codes import FINISHED, NEVER_RESTARTED

REDIS_START_SECONDS = 20.0
STOP_SECONDS = 7.0
REDIS_STOP_SECONDS = 2.0
RESTARTS = 3


class RunFailed(Exception):
    """The run cannot go on; the message says which process ended and shows its last words."""


class Supervisor:
    """`config_file` and `overrides` go to the services as they are; ports and the Redis address are added."""

    def __init__(self, config: Config, config_file: Path, overrides: list[str]) -> None:
        self._config, self._file, self._overrides = config, config_file, overrides
        self._logs = config.run.path / "logs"
        self.redis_url = config.redis.url
        self._redis: ServiceProcess | None = None
        self.grpc_ports: dict[str, int] = {}
        self.services: list[ServiceProcess] = []

    def start(self) -> None:
        """Raises RunFailed when the embedded Redis does not answer."""
        if self._config.data.preferences is None:
            if self.redis_url is None:
                self._start_redis()
            for index in range(self._config.rollout.replicas):
                self._add("rollout", f"rollout-{index}")
            for index in range(self._config.reward.replicas):
                self._add("reward", f"reward-{index}")
        self.trainer = self._add("trainer", "trainer")

    def finished(self) -> bool:
        """Looks after every process: True once the trainer has done its last step. Raises RunFailed."""
        code = self.trainer.exit_code()
        if code == FINISHED:
            return True
        for service in self.services:
            code = service.exit_code()
            if code is None:
                continue
            if code in NEVER_RESTARTED or not service.restart():
                raise RunFailed(f"{service.name} ended with status {code} ({service.log}):\n{service.last_lines()}")
        if self._redis is not None and self._redis.exit_code() is not None and not self._redis.restart():
            raise RunFailed(f"Redis ended ({self._redis.log}):\n{self._redis.last_lines()}")
        return False

    def stop(self, hurry: threading.Event) -> None:
        """Ends all processes within ten seconds; the trainer leaves a checkpoint unless `hurry` is set meanwhile."""
        deadline = time.monotonic() + STOP_SECONDS
        for service in self.services:
            service.terminate()
        while any(service.exit_code() is None for service in self.services) and time.monotonic() < deadline:
            if hurry.wait(0.05):
                break
        for service in self.services:
            service.wait(time.monotonic())
        if self._redis is not None:
            self._redis.terminate()
            self._redis.wait(time.monotonic() + REDIS_STOP_SECONDS)

    def client(self) -> redis.Redis | None:
        """One that gives up at once: what it reads is only shown. None for a run without Redis."""
        if self.redis_url is None:
            return None
        return redis.Redis.from_url(self.redis_url, socket_timeout=1.0, retry=Retry(ConstantBackoff(0.0), 0))

    def _start_redis(self) -> None:
        directory = self._config.run.path / "redis"
        directory.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.redis_url = f"redis://127.0.0.1:{port}/0"
        self._redis = ServiceProcess(
            "redis",
            [sys.executable, "-m", "services.cli.redis_server", "--directory", str(directory), "--port", str(port)],
            self._logs / "redis.log",
            restarts_left=RESTARTS,
        )
        self._redis.start()
        deadline = time.monotonic() + REDIS_START_SECONDS
        while not self._answers():
            if self._redis.exit_code() is not None or time.monotonic() > deadline:
                raise RunFailed(f"Redis does not start ({self._redis.log}):\n{self._redis.last_lines()}")
            time.sleep(0.05)

    def _answers(self) -> bool:
        client = self.client()
        assert client is not None
        try:
            with client:
                return bool(client.ping())
        except redis.exceptions.ConnectionError:
            return False

    def _add(self, service: str, name: str) -> ServiceProcess:
        port = free_port()
        self.grpc_ports[name] = port
        settings = [*self._overrides, f"{service}.server.grpc_port={port}"]
        if self.redis_url is not None:
            settings.append(f"redis.url={self.redis_url}")
        arguments = ["-m", f"services.{service}", "--config", str(self._file)]
        for setting in settings:
            arguments += ["--set", setting]
        process = ServiceProcess(
            name, [*self._launcher(service), *arguments], self._logs / f"{name}.log", _threads(), restarts_left=RESTARTS
        )
        process.start()
        self.services.append(process)
        return process

    def _launcher(self, service: str) -> list[str]:
        ranks = self._config.trainer.processes
        if service != "trainer" or ranks == 1:
            return [sys.executable]
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        return [sys.executable, *torchrun, "--master-addr", "127.0.0.1", "--master-port", str(free_port())]


def _threads() -> dict[str, str]:
    """Several processes share the cores: more than one thread each makes all of them slower."""
    return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
