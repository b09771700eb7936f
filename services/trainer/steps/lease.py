"""One trainer per run, on any machine: a key in the run's Redis that the trainer holds and renews."""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import redis
from redis.backoff import NoBackoff
from redis.exceptions import LockNotOwnedError
from redis.lock import Lock
from redis.retry import Retry

from services.common.errors import TrivetError, Unavailable
from services.common.logs import get_logger

# What a crash on another machine makes its successor wait for.
TTL_SECONDS = 15.0
LOOK_SECONDS = 0.25
JOIN_SECONDS = 2.0

log = get_logger(__name__)


@dataclass(frozen=True)
class Holder:
    """The owner of a lease. `kernel` is the boot and process namespace in which `pid` and `started` are valid."""

    host: str
    pid: int
    started: str
    kernel: str
    lease: str

    @classmethod
    def this_process(cls) -> "Holder":
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _started(pid) or "", _kernel(), uuid.uuid4().hex)

    @classmethod
    def parse(cls, text: bytes) -> "Holder | None":
        """None for what is not a holder."""
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError, RecursionError):
            return None

    def dump(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @property
    def is_here(self) -> bool:
        """Whether this process can tell if the holder lives."""
        return bool(self.kernel) and self.kernel == _kernel()

    @property
    def lives(self) -> bool:
        """Only meaningful if it is on this machine."""
        return _started(self.pid) == self.started


class Lease:
    """{run}:trainer, renewed by a thread of its own. A Redis that lost it gets it again, unless another took it."""

    def __init__(
        self,
        client: redis.Redis,
        run: str,
        *,
        ttl_seconds: float = TTL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._run, self._ttl, self._clock = client, run, ttl_seconds, clock
        self._key = f"{run}:trainer"
        self._me = Holder.this_process()
        self._lock = Lock(client, self._key, timeout=ttl_seconds, thread_local=False)
        self._renewed = 0.0
        self._lost: str | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def acquire(self, stop: threading.Event) -> None:
        """Waits for what a trainer that died elsewhere left behind, at most its time to live, or until `stop` is set.

        Raises Unavailable ("run_taken") while another trainer of the run lives.
        """
        deadline = self._clock() + 1.5 * self._ttl
        reported = False
        while not self._try():
            value = self._value()
            holder = Holder.parse(value)
            if holder is not None and holder.is_here and not holder.lives:
                self._evict(value, holder)
                continue
            if stop.is_set() or self._clock() > deadline or (holder is not None and holder.is_here):
                raise Unavailable("run_taken", self._taken(holder))
            if not reported:
                reported = True
                log.info("waiting for the lease of another trainer", key=self._key, seconds=1.5 * self._ttl)
            stop.wait(LOOK_SECONDS)
        self._thread.start()

    def check(self) -> None:
        """Raises TrivetError ("lease_lost") when another trainer has the run: nothing more may be written."""
        if self._lost is None and self._clock() - self._renewed > self._ttl / 2:
            self._renew()
        if self._lost is not None:
            raise TrivetError("lease_lost", self._lost)

    def close(self) -> None:
        """Releases it, so that a successor need not wait. Does not wait for a Redis that is down: the lease expires."""
        self._ended.set()
        self._client.set_retry(Retry(NoBackoff(), 0))
        if self._thread.is_alive():
            self._thread.join(JOIN_SECONDS)
        try:
            self._lock.do_release(cast(str, self._me.dump()))
        except (redis.RedisError, LockNotOwnedError, Unavailable) as error:
            log.warning("lease not given back", reason=str(error))

    def _keep(self) -> None:
        while not self._ended.wait(self._ttl / 4):
            try:
                self._renew()
            except (redis.RedisError, Unavailable) as error:
                log.warning("lease not renewed", reason=f"{type(error).__name__}: {error}")

    def _renew(self) -> None:
        try:
            self._lock.reacquire()
            self._renewed = self._clock()
        except LockNotOwnedError:
            if not self._try():
                self._lost = self._taken(Holder.parse(self._value()))
                log.error("lease lost", reason=self._lost)

    def _try(self) -> bool:
        asked = self._clock()
        mine = self._me.dump()
        # A retried SET may find its own first try.
        if not self._lock.acquire(blocking=False, token=cast(str, mine)) and self._value() != mine:
            return False
        self._lock.local.token = mine
        self._renewed = asked
        return True

    def _value(self) -> bytes:
        return cast(bytes | None, self._client.get(self._key)) or b""

    def _evict(self, value: bytes, holder: Holder) -> None:
        try:
            self._lock.do_release(cast(str, value))
            log.info("lease of a dead trainer taken over", pid=holder.pid)
        except LockNotOwnedError:
            log.info("the lease of a dead trainer has already been removed", pid=holder.pid)

    def _taken(self, holder: Holder | None) -> str:
        who = f"process {holder.pid} on {holder.host}" if holder else "another process"
        return (
            f"run.name is {self._run!r}, and {who} is training that run (key {self._key} in Redis): "
            "stop it first, or give this run another run.name"
        )


def _kernel() -> str:
    """Empty if the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When the process started, in the kernel's own words; None when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
