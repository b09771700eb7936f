"""Signals that arrive while the main thread waits for what they set."""

import signal
import subprocess
import sys
import time

# The main thread is inside wait() of the event nearly always, at every point of it.
PROGRAM = """
import signal, threading
from services.common.signals import on_signals

stop = threading.Event()
on_signals(lambda _: stop.set(), (signal.SIGUSR1,))
print("ready", flush=True)
seen = 0
while seen < 3000:
    if stop.wait(1e-6):
        stop.clear()
        seen += 1
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
print("done", flush=True)
"""
PATIENCE_SECONDS = 60.0
BETWEEN_SIGNALS_SECONDS = 0.0002


def test_no_signal_blocks_the_thread_that_waits():
    """A handler that sets the event itself ends this after some hundred signals."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        deadline = time.monotonic() + PATIENCE_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGUSR1)
            time.sleep(BETWEEN_SIGNALS_SECONDS)
        process.kill()
        assert process.stdout.read() == "done\n"


def test_usr1_prints_what_every_thread_does():
    program = (
        "import threading; from services.common.signals import tell_stacks; tell_stacks();"
        "threading.Thread(target=lambda: print('ready', flush=True) or input(), daemon=True).start();"
        "threading.Event().wait(60)"
    )
    command = [sys.executable, "-c", program]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        # The main thread, which waits, comes last.
        told = ""
        while "in <module>" not in told:
            told += process.stderr.readline()
        assert process.poll() is None
        process.kill()
    assert "in <lambda>" in told
    assert "in wait" in told
