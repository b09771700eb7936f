"""The processes of a run: started, watched, restarted within a bound, and reliably ended."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.cli.shared.ending import Ending, read_ending
from services.cli.shared.restarts import RestartBudget

KILL_WAIT_SECONDS = 2.0
# More than any attempt of a service writes, and little enough to read at once.
WORDS_BYTES = 1 << 20


@dataclass
class ServiceProcess:
    """In a session of its own: a terminal's Ctrl-C does not reach it, and its children can be ended with it.

    It inherits the file descriptor `lock`, where one is given.
    """

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    restarts: RestartBudget = field(default_factory=lambda: RestartBudget(0, 1.0))
    lock: int | None = None
    _process: "subprocess.Popen[bytes] | None" = None
    # Where this attempt's part of the log begins.
    _log_start: int = 0

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._log_start = output.tell()
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment},
                start_new_session=True,
                pass_fds=() if self.lock is None else (self.lock,),
            )

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll() if self._process else None

    def ending(self) -> Ending:
        """Of one that has ended."""
        return read_ending(self.exit_code() or 0, self._words(WORDS_BYTES))

    def restart(self) -> bool:
        """False when the bound is reached."""
        if not self.restarts.take():
            return False
        self.start_again()
        return True

    def start_again(self) -> None:
        # What the dead process started must not keep running next to its successor.
        self.kill()
        self.start()

    def terminate(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def wait(self, deadline: float) -> None:
        """Until it has ended, or until the monotonic time `deadline`; then it is killed with all its children."""
        if self._process is not None:
            try:
                self._process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.kill()
            self.kill_group()

    def kill(self) -> None:
        self.kill_group()
        if self._process is not None:
            self._process.wait(KILL_WAIT_SECONDS)

    def kill_group(self) -> None:
        if self._process is not None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    def last_lines(self, count: int = 12) -> str:
        """Of this attempt, not of an earlier one."""
        return "\n".join(self._words(16_384).splitlines()[-count:])

    def _words(self, most: int) -> str:
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(self._log_start, self.log.stat().st_size - most))
            return file.read().decode(errors="replace")


def free_port() -> int:
    with socket.socket() as candidate:
        candidate.bind(("127.0.0.1", 0))
        port: int = candidate.getsockname()[1]
        return port
