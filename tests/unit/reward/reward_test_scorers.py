"""Scorers that misbehave, each in its own way. Loaded by import path, inside scorer processes."""

import os
import random
import signal
import time
from pathlib import Path

from services.reward.types import ScorerFailure, deterministic


def length(prompt, completion, metadata, *, scale=1.0):
    return len(completion) * scale


@deterministic
def counted(prompt, completion, metadata):
    """Leaves a trace of each call, so that a test can tell a cached score from a computed one."""
    with Path(metadata["calls"]).open("a") as calls:
        calls.write("x")
    return 1.0


def endless_when_asked(prompt, completion, metadata):
    while completion == "hang":
        pass
    return 1.0


def stubborn(prompt, completion, metadata):
    if completion == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    return 1.0


def raises(prompt, completion, metadata):
    raise KeyError("nothing here")


class Unpicklable(Exception):
    def __init__(self, first, second):
        super().__init__(first)


def raises_unpicklable(prompt, completion, metadata):
    raise Unpicklable("first", "second")


def leaves(prompt, completion, metadata):
    raise SystemExit(3)


def dies_when_asked(prompt, completion, metadata):
    if completion == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def returns_text(prompt, completion, metadata):
    return "1.0"


def returns_nan(prompt, completion, metadata):
    return float("nan")


def returns_true(prompt, completion, metadata):
    return True


def returns_failure(prompt, completion, metadata):
    return ScorerFailure("the judge is out to lunch")


def returns_unknown_code(prompt, completion, metadata):
    return ScorerFailure("odd", code="out_to_lunch")


def flaky(prompt, completion, metadata):
    """Fails the first `failures` times, counted in a file because each try may run in another process."""
    path = Path(metadata["calls"])
    before = len(path.read_text()) if path.exists() else 0
    path.write_text("x" * (before + 1))
    if before < metadata["failures"]:
        return ScorerFailure("not yet")
    return 1.0


def sleepy(prompt, completion, metadata):
    time.sleep(metadata["seconds"])
    return random.random()


def process_id(prompt, completion, metadata):
    return os.getpid()


def hangs_with_trace(prompt, completion, metadata):
    Path(os.environ["TRACE"]).write_text(str(os.getpid()))
    while True:
        pass
