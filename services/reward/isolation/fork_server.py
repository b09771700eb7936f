"""python -m services.reward.isolation.fork_server FD: forks scorer processes, and ends them with all that they start.

A process of its own, run afresh: it holds neither the service's memory nor its environment. It has no threads and has
loaded the built-in scorers, so that a new process is there in milliseconds. It is the parent of every process whose own
parent ends, and kills it: what a scorer starts lives at most as long as the scorer process. It ends with the service,
however that ends, because its end of the control socket closes. Its own parent does nothing but wait, and kills what
it leaves behind when it is killed itself.
"""

import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from services.common.errors import InvalidData
from services.reward.isolation.containment import User, adopt_orphans, contain, find_user, go_first, protect_service
from services.reward.isolation.scorer_process import serve

# Nothing announces a new orphan.
SWEEP_SECONDS = 0.5


class ForkServer:
    """Handles {"start": number} with a socket, and {"kill": number}; says {"ended": number, "status": exit code}."""

    def __init__(self, control: socket.socket, settings: dict[str, Any], user: User | None) -> None:
        self._control, self._settings, self._user = control, settings, user
        self._numbers: dict[int, int] = {}
        self._wake_reading, self._wake_writing = os.pipe()
        os.set_blocking(self._wake_reading, False)
        os.set_blocking(self._wake_writing, False)

    def run(self) -> None:
        signal.set_wakeup_fd(self._wake_writing)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while self._wait(SWEEP_SECONDS):
            ended = self._reap()
            self._kill_orphans()
            for number, status in ended:
                self._control.send(json.dumps({"ended": number, "status": status}).encode())

    def _wait(self, seconds: float) -> bool:
        """False once the service has ended."""
        control = self._control.fileno()
        ready, _, _ = select.select([control, self._wake_reading], [], [], seconds)
        if self._wake_reading in ready:
            os.read(self._wake_reading, 4_096)
        return control not in ready or self._obey()

    def _obey(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._control, 4_096, 1)
        if not data:
            return False
        command = json.loads(data)
        if "start" in command:
            self._start(command["start"], descriptors[0])
        for pid, number in self._numbers.items():
            if number == command.get("kill"):
                _kill({pid})
        return True

    def _start(self, number: int, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_scorer(descriptor, parent)
        os.close(descriptor)
        self._numbers[pid] = number

    def _become_scorer(self, descriptor: int, parent: int) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            for caught in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(caught, signal.SIG_DFL)
            self._control.close()
            os.close(self._wake_reading)
            os.close(self._wake_writing)
            missing = contain(self._settings["memory_mib"], self._user, parent)
            serve(socket.socket(fileno=descriptor), self._settings["scorers"], missing)
        except BaseException:  # noqa: BLE001 - a second copy of the fork server must not come out of here
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self) -> list[tuple[int, int]]:
        """Numbers and exit codes of the scorer processes that have ended."""
        ended = []
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                number = self._numbers.pop(found[0], None)
                if number is not None:
                    ended.append((number, os.waitstatus_to_exitcode(found[1])))
        return ended

    def _kill_orphans(self) -> None:
        _kill(_children("self").difference(self._numbers))


def _kill(found: set[int]) -> None:
    """These processes and all below them, stopped first: what is stopped forks no more."""
    stopped: set[int] = set()
    while found:
        _signal(found, signal.SIGSTOP)
        stopped |= found
        found = {child for pid in stopped for child in _children(str(pid))} - stopped
    _signal(stopped, signal.SIGKILL)


def _end_children() -> None:
    """All, with those that become children meanwhile because their parent has ended."""
    with suppress(ChildProcessError):
        while True:
            _kill(_children("self"))
            os.waitpid(-1, 0)


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _children(process: str) -> set[int]:
    found: set[int] = set()
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        # It may have ended by now.
        with suppress(FileNotFoundError, ProcessLookupError):
            found.update(int(pid) for pid in thread.read_text().split())
    return found


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    settings = json.load(sys.stdin)
    server = os.fork()
    if not server:
        # Before its own files in /proc are closed to it.
        go_first()
    protect_service()
    adopt_orphans()
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    if server:
        control.close()
        os.waitpid(server, 0)
    else:
        _serve(control, settings)
    _end_children()


def _serve(control: socket.socket, settings: dict[str, Any]) -> None:
    try:
        user = find_user(settings["user"])
    except InvalidData as error:
        control.send(json.dumps({"problem": [error.code, str(error)]}).encode())
        return
    for module in settings["preload"]:
        # The scorer process says it better: it knows whose module that is.
        with suppress(ImportError):
            importlib.import_module(module)
    control.send(json.dumps({"user": user.name if user else None}).encode())
    with suppress(ConnectionError):
        ForkServer(control, settings, user).run()


if __name__ == "__main__":
    main()
    # Taking the libraries down in order would only hold up the service.
    sys.stderr.flush()
    os._exit(0)
