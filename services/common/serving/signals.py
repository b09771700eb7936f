"""Signals for code that waits in threads."""

import ctypes
import faulthandler
import queue
import signal
import sys
import threading
from collections.abc import Callable

STDERR = 2
PR_SET_PDEATHSIG = 1


def ending_signals() -> tuple[signal.Signals, ...]:
    """Those that ask a process to end. A closed terminal is one, except under nohup."""
    asked = (signal.SIGTERM, signal.SIGINT)
    return asked if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (*asked, signal.SIGHUP)


def on_signals(react: Callable[[int], None], numbers: tuple[signal.Signals, ...] | None = None) -> None:
    """From now on `react(number)` runs in a thread of its own, once for each signal, by default for those that ask to
    end. Call it in the main thread.

    A Python handler runs inside the main thread, at any point of it: one that sets a threading.Event stops forever
    when the main thread is just then inside wait() of that event, whose lock is not reentrant. SimpleQueue.put is
    reentrant (documented with queue.SimpleQueue), so the handler does nothing but that.
    """
    received: queue.SimpleQueue[int] = queue.SimpleQueue()

    def watch() -> None:
        while True:
            react(received.get())

    threading.Thread(target=watch, name="signals", daemon=True).start()
    for number in ending_signals() if numbers is None else numbers:
        signal.signal(number, lambda caught, _: received.put(caught))


def interrupt_on_signals() -> None:
    """From now on the first signal that asks to end raises KeyboardInterrupt in the main thread.

    Further ones are ignored: what is ended for the first is not to be left half ended.
    """

    def interrupt(*_: object) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    numbers = ending_signals()
    for number in numbers:
        signal.signal(number, interrupt)


def dump_stacks_on_signal() -> None:
    """From now on SIGUSR1 prints what every thread is doing to stderr: for a process that seems to hang."""
    faulthandler.register(signal.SIGUSR1, file=STDERR, all_threads=True)


def die_with_parent() -> None:
    """From now on the kernel kills this process when the one that started it ends, however that ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
