"""Signals for code that waits in threads."""

import ctypes
import faulthandler
import queue
import signal
import sys
import threading
from collections.abc import Callable

ENDING = (signal.SIGTERM, signal.SIGINT)
STDERR = 2
PR_SET_PDEATHSIG = 1


def on_signals(react: Callable[[int], None], numbers: tuple[signal.Signals, ...] = ENDING) -> None:
    """From now on `react(number)` runs in a thread of its own, once for each signal. Call it in the main thread.

    A Python handler runs inside the main thread, at any point of it: one that sets a threading.Event stops forever
    when the main thread is just then inside wait() of that event, whose lock is not reentrant. SimpleQueue.put is
    reentrant (documented with queue.SimpleQueue), so the handler does nothing but that.
    """
    received: queue.SimpleQueue[int] = queue.SimpleQueue()

    def watch() -> None:
        while True:
            react(received.get())

    threading.Thread(target=watch, name="signals", daemon=True).start()
    for number in numbers:
        signal.signal(number, lambda caught, _: received.put(caught))


def dump_stacks_on_signal() -> None:
    """From now on SIGUSR1 prints what every thread is doing to stderr: for a process that seems to hang."""
    faulthandler.register(signal.SIGUSR1, file=STDERR, all_threads=True)


def die_with_parent() -> None:
    """From now on the kernel kills this process when the one that started it ends, however that ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
