"""Scorers that return or raise what is hard to pass on, and scorers that reach for what is not theirs."""

import ctypes
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

from services.reward.scorers.types import ScorerFailure, deterministic


def outcome(prompt, completion, metadata):
    """The one that `completion` names."""
    return OUTCOMES[completion]()


class Unreadable:
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__

    def __float__(self):
        raise SystemExit(1)


class UnreadableError(Exception):
    def __str__(self):
        raise KeyboardInterrupt

    __repr__ = __str__


class Nameless(type):
    __name__ = property(lambda self: 1 / 0)


class NamelessError(Exception, metaclass=Nameless):
    pass


class EvilNumber(float):
    def __float__(self):
        raise UnreadableError


class EvilText(str):
    def __getitem__(self, _):
        return 7

    def __str__(self):
        return self


class Unpicklable(Exception):
    def __init__(self, first, second):
        super().__init__(first)


def fail(error):
    raise error


def recurse():
    return recurse()


def deeply_nested():
    error = None
    for _ in range(50_000):
        error = [error]
    raise ValueError(error)


def channels():
    """Of this process to the service; what else it inherited from there is the standard streams."""
    for name in os.listdir("/proc/self/fd"):
        if (
            int(name) > 2
            and os.path.exists(f"/proc/self/fd/{name}")
            and "socket" in os.readlink(f"/proc/self/fd/{name}")
        ):
            yield int(name)


def write_to_channel(data):
    for channel in channels():
        os.write(channel, data)
    return 1.0


def framed(message):
    data = json.dumps(message).encode()
    return len(data).to_bytes(4, "little") + data


def fork_and_return():
    return float(os.fork() >= 0)


def close_channel():
    for channel in list(channels()):
        os.close(channel)
    time.sleep(60)


def alarm_later():
    signal.signal(signal.SIGALRM, lambda *_: fail(UnreadableError()))
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return 1.0


OUTCOMES = {
    "surrogate": lambda: fail(ValueError(json.loads(r'"\ud800"'))),
    "surrogate failure": lambda: ScorerFailure("\ud800"),
    "surrogate code": lambda: ScorerFailure("odd", code="\ud800"),
    "terminal": lambda: fail(ValueError("\x1b[2J\x00")),
    "huge int": lambda: 10**400,
    "huge fraction": lambda: Fraction(10**400, 3),
    "decimal nan": lambda: Decimal("NaN"),
    "signaling nan": lambda: Decimal("sNaN"),
    "infinity": lambda: float("-inf"),
    "complex": lambda: 1 + 2j,
    "none": lambda: None,
    "unreadable": Unreadable,
    "evil number": lambda: EvilNumber(0.5),
    "unreadable failure": lambda: ScorerFailure(Unreadable()),
    "unreadable code": lambda: ScorerFailure("odd", code=Unreadable()),
    "evil text": lambda: ScorerFailure(EvilText("text")),
    "unreadable error": lambda: fail(UnreadableError()),
    "nameless error": lambda: fail(NamelessError()),
    "unpicklable": lambda: fail(Unpicklable("first", "second")),
    "exit": lambda: fail(SystemExit(3)),
    "interrupt": lambda: fail(KeyboardInterrupt()),
    "generator exit": lambda: fail(GeneratorExit()),
    "recursion": recurse,
    "deeply nested": deeply_nested,
    "enormous": lambda: fail(ValueError("x" * 50_000_000)),
    "enormous failure": lambda: ScorerFailure("\ud800" * 5_000_000),
    "many digits": lambda: json.loads("1" * 5_000),
    "abort": os.abort,
    "segfault": lambda: ctypes.string_at(0),
    "leave": lambda: os._exit(0),
    "garbage": lambda: write_to_channel(b"\xff" * 100),
    "no json": lambda: write_to_channel(b"\x04\x00\x00\x00\xff\xff\xff\xff"),
    "deep json": lambda: write_to_channel((60_000).to_bytes(4, "little") + b"[" * 60_000),
    "no outcome": lambda: write_to_channel(framed({"score": "1"})),
    "infinite outcome": lambda: write_to_channel(framed({"score": 1e999})),
    "no object": lambda: write_to_channel(framed([1])),
    "unhashable code": lambda: write_to_channel(framed({"code": {}, "reason": "", "retryable": True})),
    "close": close_channel,
    "fork": fork_and_return,
    "alarm": alarm_later,
    "fine": lambda: 1.0,
}


def raises_answer(prompt, completion, metadata):
    raise ValueError(json.loads(completion)["answer"])


@deterministic
def hangs_deterministically(prompt, completion, metadata):
    _count(metadata)
    time.sleep(60)


def hangs(prompt, completion, metadata):
    _count(metadata)
    time.sleep(60)


@deterministic
def raises_deterministically(prompt, completion, metadata):
    _count(metadata)
    raise KeyError("answer")


@deterministic
def dies(prompt, completion, metadata):
    _count(metadata)
    os.abort()


def _count(metadata):
    with Path(metadata["calls"]).open("a") as calls:
        calls.write("x")


def allocates(prompt, completion, metadata):
    """So many MiB, written to."""
    return float(len(bytearray(b"\x01") * (int(completion) * 2**20)) > 0)


GRANDCHILD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.setsid()
if daemon := os.fork():
    with open(sys.argv[1], "w") as trace:
        trace.write(str(daemon))
    os._exit(0)
os.setsid()
time.sleep(600)
"""


def daemon(prompt, completion, metadata):
    """Starts a daemon, and a child in a session of its own; then does as `completion` says."""
    with subprocess.Popen([sys.executable, "-c", GRANDCHILD, metadata["trace"] + ".daemon"]):
        pass
    child = subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(600)"])
    Path(metadata["trace"] + ".child").write_text(str(child.pid))
    while completion == "hang":
        time.sleep(1)
    return 1.0


def runner(prompt, completion, metadata):
    """Starts a process that forks and ends, over and over: its number is another one at each look."""
    if os.fork():
        return 1.0
    os.setsid()
    signal.alarm(60)
    while True:
        if os.fork():
            os._exit(0)
        with open(metadata["trace"], "ab") as trace:
            trace.write(b"x")


def family(prompt, completion, metadata):
    """Four generations of processes, each in a session of its own, that all keep forking."""
    for _ in range(4):
        os.fork()
    if os.getsid(0) != os.getpid():
        os.setsid()
    with open(metadata["trace"], "ab") as trace:
        trace.write(f"{os.getpid()}\n".encode())
    while True:
        if not os.fork():
            os._exit(0)
        os.waitpid(-1, 0)


def reaches(prompt, completion, metadata):
    """What came of it, as a failure's reason."""
    return ScorerFailure(json.dumps(REACHES[completion](metadata)))


def attempt(function):
    try:
        return function()
    except OSError as error:
        return errno.errorcode[error.errno]


REACHES = {
    "environment": lambda metadata: dict(os.environ),
    "service's environment": lambda metadata: attempt(lambda: Path(f"/proc/{metadata['pid']}/environ").read_text()),
    "service's memory": lambda metadata: attempt(lambda: open(f"/proc/{metadata['pid']}/mem", "rb").close()),
    "kill": lambda metadata: attempt(lambda: os.kill(metadata["pid"], signal.SIGKILL)),
    "status": lambda metadata: dict(
        line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line
    ),
    "limits": lambda metadata: [
        resource.getrlimit(which)
        for which in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_DATA)
    ],
    "sockets": lambda metadata: len(list(channels())),
    "oom score": lambda metadata: Path("/proc/self/oom_score_adj").read_text().strip(),
    "session": lambda metadata: os.getsid(0) == os.getpid(),
}
