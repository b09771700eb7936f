"""Scorer processes as the service sees them: started by its fork server, asked one thing at a time, killed."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from services.common.config import ScorerConfig
from services.common.errors import InvalidData, Unavailable
from services.common.logs import get_logger
from services.reward.isolation.containment import Containment
from services.reward.isolation.frames import decode_outcome, pack_frame, receive_frame
from services.reward.scorers import BUILT_IN
from services.reward.scorers.types import ScorerFailure

START_SECONDS = 120.0
# A killed process that still runs after this will not end: the fork server is replaced.
STUCK_SECONDS = 30.0
CONTROL_BYTES = 4_096

log = get_logger(__name__)


class ProcessDied(Exception):
    """It ended, or was killed because what it wrote made no sense."""


class ScorerProcess:
    """One request at a time. After any exception it is dead."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        kill: Callable[[], None],
        give_up: Callable[[], None],
    ) -> None:
        self._reader, self._writer = reader, writer
        self.kill, self._give_up = kill, give_up
        # The exit code, once it has ended; None when the fork server went first.
        self.ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    def end(self, status: int | None) -> None:
        if not self.ended.done():
            self.ended.set_result(status)
        # Something that it started may still hold the other end.
        self._writer.transport.abort()

    async def first_words(self) -> dict[str, Any]:
        """What it says about its scorers. Raises TimeoutError or ProcessDied."""
        return await self._receive(b"", START_SECONDS)

    async def call(self, request: dict[str, Any], timeout_seconds: float) -> float | ScorerFailure:
        """Raises TimeoutError or ProcessDied."""
        message = await self._receive(pack_frame(request), timeout_seconds)
        try:
            return decode_outcome(message)
        except ValueError as error:
            await self._kill_and_wait()
            raise ProcessDied(f"{error}; its process was killed") from error

    async def _receive(self, frame: bytes, timeout_seconds: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_seconds):
                self._writer.write(frame)
                await self._writer.drain()
                return await receive_frame(self._reader)
        except TimeoutError:
            await self._kill_and_wait()
            raise
        except ValueError as error:
            await self._kill_and_wait()
            raise ProcessDied(f"{error}; its process was killed") from error
        except (EOFError, OSError) as error:
            raise ProcessDied(_ending(await self._kill_and_wait())) from error
        except asyncio.CancelledError:
            self.kill()
            raise

    async def _kill_and_wait(self) -> int | None:
        self.kill()
        await asyncio.wait({self.ended}, timeout=STUCK_SECONDS)
        if not self.ended.done():
            log.error("scorer_process_stuck", seconds=STUCK_SECONDS)
            self._give_up()
            return None
        return self.ended.result()


class ScorerProcesses:
    """A fork server and what it started."""

    def __init__(self, scorers: Sequence[ScorerConfig], containment: Containment) -> None:
        self._settings = {
            "scorers": [scorer.model_dump(mode="json", include={"name", "options"}) for scorer in scorers],
            "preload": sorted({BUILT_IN[scorer.name] for scorer in scorers if scorer.name in BUILT_IN}),
            "memory_mib": containment.memory_mib,
            "user": containment.user,
        }
        self._environment = containment.variables(os.environ)
        self._processes: dict[int, ScorerProcess] = {}
        self._started = 0
        self._server: subprocess.Popen[bytes] | None = None
        self._listening: asyncio.Task[None] | None = None
        self.user: str | None = None

    @property
    def open(self) -> bool:
        return self._listening is not None and not self._listening.done()

    async def start(self) -> None:
        """Raises InvalidData for a user that scorers cannot run as, Unavailable without a fork server."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        try:
            with theirs:
                self._server = await asyncio.to_thread(self._launch, theirs.fileno())
            async with asyncio.timeout(START_SECONDS):
                words = await self._receive()
        except (TimeoutError, OSError) as error:
            log.warning("scorer_fork_server_not_started", reason=f"{type(error).__name__}: {error}")
            words = None
        if words is None or "problem" in words:
            await self.close()
            if words:
                raise InvalidData(*words["problem"])
            raise Unavailable("scorer_start", "the scorers' fork server did not come up; its output says why")
        self.user = words["user"]
        self._listening = asyncio.create_task(self._listen())

    async def add(self) -> tuple[ScorerProcess, dict[str, Any]]:
        """A process with its scorers loaded, and what it reported about them.

        Raises InvalidData when they cannot be loaded, Unavailable when the process does not come up.
        """
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        self._started = number = self._started + 1
        process = ScorerProcess(reader, writer, lambda: self._say({"kill": number}), self._give_up)
        self._processes[number] = process
        with theirs:
            self._say({"start": number}, theirs.fileno())
        try:
            words = await process.first_words()
        except (TimeoutError, ProcessDied) as error:
            reason = str(error) or f"its scorers did not load within {START_SECONDS:g} s"
            raise Unavailable("scorer_start", f"no scorer process came up: {reason}") from error
        if "problem" in words:
            raise InvalidData(*words["problem"])
        return process, words

    async def close(self) -> None:
        """Kills what still runs."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        self._control.close()
        if self._server is not None:
            try:
                await asyncio.to_thread(self._server.wait, STUCK_SECONDS)
            except subprocess.TimeoutExpired:
                # Its group: the fork server and the process that waits for it.
                os.killpg(self._server.pid, signal.SIGKILL)

    def _launch(self, control: int) -> "subprocess.Popen[bytes]":
        server = subprocess.Popen(
            [sys.executable, "-m", "services.reward.isolation.fork_server", str(control)],
            stdin=subprocess.PIPE,
            pass_fds=[control],
            env=self._environment,
            start_new_session=True,
        )
        assert server.stdin is not None
        # One that ended at once is noticed by its silence.
        with suppress(BrokenPipeError), server.stdin as stdin:
            stdin.write(json.dumps(self._settings).encode())
        return server

    async def _receive(self) -> dict[str, Any] | None:
        data = await asyncio.get_running_loop().sock_recv(self._control, CONTROL_BYTES)
        return json.loads(data) if data else None

    async def _listen(self) -> None:
        try:
            while words := await self._receive():
                if process := self._processes.pop(words["ended"], None):
                    process.end(words["status"])
        except OSError as error:
            log.warning("scorer_fork_server_lost", reason=str(error))
        finally:
            while self._processes:
                self._processes.popitem()[1].end(None)

    def _say(self, command: dict[str, Any], *descriptors: int) -> None:
        try:
            socket.send_fds(self._control, [json.dumps(command).encode()], descriptors)
        except OSError as error:
            log.warning("scorer_fork_server_lost", reason=str(error))
            self._give_up()

    def _give_up(self) -> None:
        """The fork server takes it as the end of the service; so `_listen` ends, too."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)


def _ending(status: int | None) -> str:
    if status is None:
        return "its process ended with the fork server"
    if status >= 0:
        return f"its process ended with exit code {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    return f"its process was ended by {name}" + (" (memory may have run out)" if name == "SIGKILL" else "")
