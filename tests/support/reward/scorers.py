"""Scorers that misbehave, each in its own way. Loaded by import path, inside scorer processes."""

import asyncio
import importlib
import os
import signal
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

from services.reward.scorers.types import ScorerFailure, deterministic


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


def meets(prompt, completion, metadata):
    """Returns once another call, in another process, is under way too."""
    Path(metadata["me"]).touch()
    while not Path(metadata["other"]).exists():
        time.sleep(0.01)
    return 1.0


def process_id(prompt, completion, metadata):
    return os.getpid()


def hangs_with_trace(prompt, completion, metadata):
    Path(os.environ["TRACE"]).write_text(str(os.getpid()))
    while True:
        pass


def numpy():
    """Imported where it is used: a scorer process is quick to start without."""
    return importlib.import_module("numpy")


def torch():
    return importlib.import_module("torch")


def numpy_scalar(prompt, completion, metadata):
    return numpy().float32(0.5)


def numpy_bool(prompt, completion, metadata):
    return numpy().bool_(True)


def numpy_array(prompt, completion, metadata):
    return numpy().array([0.5, 1.0])


def torch_scalar(prompt, completion, metadata):
    return torch().tensor(0.25)


def torch_bool(prompt, completion, metadata):
    return torch().tensor(True)


def decimal(prompt, completion, metadata):
    return Decimal("0.5")


def fraction(prompt, completion, metadata):
    return Fraction(1, 2)


def truth(prompt, completion, metadata):
    return True


async def awaited(prompt, completion, metadata):
    await asyncio.sleep(0)
    return numpy().float64(0.75)


_kept = []


async def awaits_inside(prompt, completion, metadata):
    """What it keeps between calls belongs to the event loop of the first."""
    loop = asyncio.get_running_loop()
    if not _kept:
        _kept.append(loop.create_future())
        loop.call_soon(_kept[0].set_result, None)
    await asyncio.wait_for(asyncio.shield(_kept[0]), 5)
    assert _kept[0].get_loop() is loop
    return 1


def unused(_prompt, completion, _metadata):
    return len(completion)


def verl_style(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0


def swapped(completion, prompt, metadata):
    return 0.0


def two_parameters(completion, metadata):
    return 0.0


def one_too_many(prompt, completion, metadata, judge):
    return 0.0


def batched(*, prompts, completions, **others):
    return 0.0


def generator(prompt, completion, metadata):
    yield 0.0
