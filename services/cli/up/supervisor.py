"""`trivet up`: Redis, rollouts, rewards and trainer as separate processes of one machine.

A run that learns from preferences of a file needs the trainer alone.
"""

import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from services.cli.shared.processes import ServiceProcess, free_port
from services.cli.shared.restarts import RestartBudget
from services.cli.up.run_redis import RunRedis
from services.common.config import Config, overrides_environment
from services.common.exit_codes import FAILED, FINISHED, NEVER_RESTARTED

STOP_SECONDS = 7.0
# Several processes share the cores: more than one thread each makes all of them slower.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
FULL_DISK_BYTES = 1 << 20
# How long a Redis that is away is waited for; what ended meanwhile is started again when it is back.
OUTAGE_SECONDS = 1800.0


class RunFailed(Exception):
    """The run cannot continue: the message's first line says why, the second where the log is.

    `status` is 2 or 4 (exit_codes) where starting it again as it is would end the same way, and else 1.
    """

    def __init__(self, message: str, status: int = FAILED) -> None:
        super().__init__(message)
        self.status = status


class Supervisor:
    """`config_file` and `overrides` go to the services as they are; ports and the Redis address are added.

    `report` shows a line to whoever watches. The processes inherit the file descriptor `lock`.
    """

    def __init__(
        self,
        config: Config,
        config_file: Path,
        overrides: list[str],
        *,
        report: Callable[[str], None],
        lock: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._file, self._overrides = config, config_file, overrides
        self._report, self._lock, self._clock = report, lock, clock
        self._logs = config.run.path / "logs"
        self.grpc_ports: dict[str, int] = {}
        self.services: list[ServiceProcess] = []
        # Since when Redis is away, and what has ended for it.
        self._outage, self._waiting = 0.0, set[str]()
        self.redis = None if config.data.preferences is not None else RunRedis(config, lock, self._budget())

    def start(self, stop: threading.Event) -> None:
        """Raises RunFailed when Redis does not answer. Leaves off when `stop` is set meanwhile."""
        if self.redis is not None:
            self.redis.start()
            self._until_redis(stop)
            if stop.is_set():
                return
            for index in range(self._config.rollout.replicas):
                self._add("rollout", f"rollout-{index}")
            for index in range(self._config.reward.replicas):
                self._add("reward", f"reward-{index}")
        self._add("trainer", "trainer")

    def finished(self) -> bool:
        """Watches every process: True once the trainer has done its last step. Raises RunFailed."""
        if self._trainer_status() == FINISHED:
            return True
        self._look_after_redis()
        for service in self.services:
            if service.exit_code() is not None:
                self._start_again(service)
        return False

    def stop(self, hurry: threading.Event) -> None:
        """The trainer first: it ends its step and leaves a checkpoint, for which Redis and the rollouts stay.

        All else takes seconds. `hurry` ends everything at once.
        """
        trainers = [service for service in self.services if service.name == "trainer"]
        patience = self._config.trainer.stop_timeout_seconds
        if any(trainer.exit_code() is None for trainer in trainers):
            self._report(
                f"stopping: finishing the step and writing a checkpoint, for {_duration(patience)} at most "
                "(trainer.stop_timeout_seconds); Ctrl-C again ends now"
            )
            self._end(trainers, patience, hurry)
        self._end(self.services, STOP_SECONDS, hurry)
        if self.redis is not None:
            self.redis.stop()

    def _end(self, services: list[ServiceProcess], seconds: float, hurry: threading.Event) -> None:
        for service in services:
            service.terminate()
        deadline = self._clock() + seconds
        while any(service.exit_code() is None for service in services) and self._clock() < deadline:
            if hurry.wait(0.05):
                break
            if self.redis is not None:
                self.redis.keep_up()
        for service in services:
            service.wait(time.monotonic())

    def _trainer_status(self) -> int | None:
        return next((service.exit_code() for service in self.services if service.name == "trainer"), None)

    def _start_again(self, service: ServiceProcess) -> None:
        ending = service.ending()
        where = f"its log is {service.log}"
        if ending.status in NEVER_RESTARTED:
            raise RunFailed(f"{service.name}: {ending.reason}\n{where}", ending.status)
        reason = self._with_full_disk(ending.reason)
        if self._waits_for_redis(service, reason):
            return
        if service.name in self._waiting:
            # Not its own fault, so not one of its restarts.
            self._waiting.discard(service.name)
            service.start_again()
            self._report(f"{service.name} is started again: Redis answers")
        elif service.restart():
            self._report(
                f"{service.name} ended and is started again: {reason} ({where}; {service.restarts.left} more "
                f"restarts within {_duration(service.restarts.window_seconds)})"
            )
        else:
            limits = f"{service.restarts.limit} restarts within {_duration(service.restarts.window_seconds)}"
            raise RunFailed(f"{service.name}: {reason}\n{where}; {limits} are used up")

    def _with_full_disk(self, reason: str) -> str:
        """Libraries word it differently, and a log on that disk does not mention it."""
        directory = self._config.run.path
        if "disk is full" in reason or shutil.disk_usage(directory).free >= FULL_DISK_BYTES:
            return reason
        return f"the disk is full: {directory} cannot be written to"

    def _waits_for_redis(self, service: ServiceProcess, reason: str) -> bool:
        """Whether Redis is away: then nothing could start. Raises RunFailed when it has been for too long."""
        if self.redis is None or self.redis.answers():
            return False
        address, now = self.redis.shown_address, self._clock()
        if not self._waiting:
            self._outage = now
        if service.name not in self._waiting:
            self._waiting.add(service.name)
            left = _duration(self._outage + OUTAGE_SECONDS - now)
            self._report(f"{service.name} ended: {reason}; Redis at {address} does not answer: waiting {left} at most")
        if now - self._outage > OUTAGE_SECONDS:
            raise RunFailed(
                f"Redis at {address} has not answered for {_duration(OUTAGE_SECONDS)}\nthe log is {service.log}"
            )
        return True

    def _look_after_redis(self) -> None:
        if self.redis is not None and (ending := self.redis.keep_up()) is not None:
            if not ending.started_again:
                raise RunFailed(f"Redis: {ending.reason}\nits log is {ending.log}")
            self._report(f"Redis ended and is started again: {ending.reason} (its log is {ending.log})")

    def _until_redis(self, stop: threading.Event) -> None:
        assert self.redis is not None
        deadline = self._clock() + self.redis.patience
        reported = False
        while not stop.is_set() and (problem := self.redis.problem()) is not None:
            if problem.final or self._clock() > deadline:
                raise RunFailed(problem.sentence)
            if not reported and self.redis.is_external:
                reported = True
                self._report(f"{problem.sentence}: waiting for it, for {_duration(self.redis.patience)} at most")
            stop.wait(0.05)

    def _budget(self) -> RestartBudget:
        return RestartBudget(self._config.run.restarts, self._config.run.restart_window_seconds, self._clock)

    def _add(self, service: str, name: str) -> None:
        port = free_port()
        self.grpc_ports[name] = port
        settings = [*self._overrides, f"{service}.server.grpc_port={port}"]
        if self.redis is not None:
            settings.append(f"redis.url={self.redis.url}")
        process = ServiceProcess(
            name,
            [*self._launcher(service), "-m", f"services.{service}", "--config", str(self._file)],
            self._logs / f"{name}.log",
            {**ENVIRONMENT, **overrides_environment(settings)},
            restarts=self._budget(),
            lock=self._lock,
        )
        process.start()
        self.services.append(process)

    def _launcher(self, service: str) -> list[str]:
        ranks = self._config.trainer.processes
        if service != "trainer" or ranks == 1:
            return [sys.executable]
        torchrun = ["-m", "services.trainer.launch", "--nproc-per-node", str(ranks)]
        torchrun += ["--shutdown-timeout", str(round(self._config.trainer.stop_timeout_seconds))]
        return [sys.executable, *torchrun, "--master-addr", "127.0.0.1", "--master-port", str(free_port())]


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
