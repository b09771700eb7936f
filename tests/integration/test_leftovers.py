"""The check for processes left behind can fail: by what leads a session of its own, and by what is called pytest."""

import os
import signal
import subprocess
import sys

from tests.support.leftovers import Leftovers

# Ends at once, and leaves behind a process in a session of its own whose command names a test's directory.
LEAVING = """
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "/tmp/pytest-of-root"],
                        start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(left.pid)
"""


def test_a_process_that_is_left_behind_is_found_and_one_that_ended_is_not():
    with Leftovers() as leftovers:
        assert leftovers.found() == []
        ended = subprocess.run([sys.executable, "-c", LEAVING], check=True, capture_output=True, text=True, timeout=30)
        (command,) = leftovers.found()
        assert "/tmp/pytest-of-root" in command
        os.kill(int(ended.stdout), signal.SIGKILL)
        os.waitpid(int(ended.stdout), 0)
        assert leftovers.found() == []


def test_what_ran_before_is_not_taken_for_left_behind():
    running = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with Leftovers() as leftovers:
        assert leftovers.found() == []
    running.communicate(b"\n")
