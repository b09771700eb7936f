"""Runs one of the trainer's modules to its end, under torchrun where it has several ranks."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from services.cli.shared.processes import ServiceProcess, free_port
from services.common.config import overrides_environment
from services.common.run_files.report import Report

R = TypeVar("R", bound=Report)


class NoReport(Exception):
    """Nothing was measured; the message gives the reason."""


@contextmanager
def starting(name: str) -> Iterator[None]:
    """Around what starts a process. Raises NoReport where it cannot be: no memory, a full disk, no permission."""
    try:
        yield
    except OSError as error:
        raise NoReport(f"{name} cannot be started ({error})") from error


@dataclass(frozen=True)
class TrainerModule:
    """`threads` each rank, as results depend on it. `overrides` may hold secrets, `arguments` may not."""

    module: str
    arguments: Sequence[str]
    log: Path
    ranks: int = 1
    threads: str = "1"
    environment: Mapping[str, str] = field(default_factory=dict)
    overrides: Sequence[str] = ()

    def report(self, kind: type[R], output: Path, deadline: float) -> R:
        """What the module writes to `output`. Raises NoReport as `run` does, InvalidData for a file that is none."""
        replace(self, arguments=[*self.arguments, "--output", str(output)]).run(deadline)
        return kind.read(output)

    def run(self, deadline: float) -> None:
        """Raises NoReport with its reason, where it cannot be started, or at the monotonic time `deadline`."""
        name = self.module.rpartition(".")[2]
        environment = {"OMP_NUM_THREADS": self.threads, "PYTHONUNBUFFERED": "1", **self.environment}
        environment |= overrides_environment(self.overrides)
        process = ServiceProcess(name, self._command(), self.log, environment)
        try:
            with starting(self.module):
                # Of this run alone: an earlier one's reason must not be taken for its own.
                self.log.unlink(missing_ok=True)
                process.start()
            process.wait(deadline)
            code = process.exit_code()
        finally:
            process.kill()
        if code != 0:
            late = "the time is up" if time.monotonic() >= deadline else process.ending().reason
            raise NoReport(f"{late} (status {code}, {self.log})")

    def _command(self) -> list[str]:
        command = [sys.executable, "-m"]
        if self.ranks > 1:
            command += ["services.trainer.launch", "--nproc-per-node", str(self.ranks)]
            command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "-m"]
        return [*command, self.module, *self.arguments]
