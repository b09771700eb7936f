"""Signals that arrive while the main thread waits for what they set."""

import signal
import subprocess
import sys
import time
from pathlib import Path

# The main thread is inside wait() of the event nearly always, at every point of it.
PROGRAM = """
import signal, threading
from services.common.serving.signals import on_signals

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
        "import threading; from services.common.serving.signals import dump_stacks_on_signal; dump_stacks_on_signal();"
        "threading.Thread(target=lambda: print('ready', flush=True) or input(), daemon=True).start();"
        "threading.Event().wait(60)"
    )
    command = [sys.executable, "-c", program]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        # The main thread, which waits, comes last.
        reported = ""
        while "in <module>" not in reported:
            reported += process.stderr.readline()
        assert process.poll() is None
        process.kill()
    assert "in <lambda>" in reported
    assert "in wait" in reported


# As torchrun does: a child in a session of its own, which a kill of the parent's group does not reach.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True, stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), flush=True)
time.sleep(60)
"""
CHILD = """
import os, time
from services.common.serving.signals import die_with_parent
die_with_parent()
print(os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_rank_does_not_outlive_its_launcher():
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while _runs(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
