import os
import sys
import time

from services.cli.shared.processes import ServiceProcess
from services.cli.shared.restarts import RestartBudget

LOOP = "import time; time.sleep(60)"
STUBBORN = (
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    f"child = subprocess.Popen([sys.executable, '-c', '{LOOP}']); print(child.pid, flush=True); time.sleep(60)"
)


def process(tmp_path, code, **options):
    return ServiceProcess("it", [sys.executable, "-c", code], tmp_path / "it.log", **options)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_output_goes_to_the_log(tmp_path):
    made = process(tmp_path, "print('hello'); raise SystemExit(3)")
    made.start()
    made.wait(time.monotonic() + 10)
    assert made.exit_code() == 3
    assert made.last_lines() == "hello"


def test_restarts_are_bounded(tmp_path):
    made = process(tmp_path, "pass", restarts=RestartBudget(2, 60.0))
    made.start()
    assert [made.restart(), made.restart(), made.restart()] == [True, True, False]
    made.kill()


def test_what_does_not_end_is_killed_with_its_children(tmp_path):
    made = process(tmp_path, STUBBORN)
    made.start()
    deadline = time.monotonic() + 10
    while not made.last_lines() and time.monotonic() < deadline:
        time.sleep(0.02)
    child = int(made.last_lines())
    made.terminate()
    started = time.monotonic()
    made.wait(time.monotonic() + 0.3)
    assert time.monotonic() - started < 5
    assert made.exit_code() == -9
    deadline = time.monotonic() + 5
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(child)


def test_a_terminals_interrupt_does_not_reach_it(tmp_path):
    made = process(tmp_path, LOOP)
    made.start()
    assert os.getsid(made.pid) != os.getsid(0)
    made.kill()


def test_restarts_are_a_rate_and_not_a_number_for_the_whole_run():
    now = [0.0]
    budget = RestartBudget(2, 100.0, clock=lambda: now[0])
    taken = []
    for at in (0, 10, 20, 99, 100, 105, 110, 210, 310):
        now[0] = float(at)
        taken.append(budget.take())
    assert taken == [True, True, False, False, True, False, True, True, True]
    now[0] = 1000.0
    assert budget.left == 2


def test_an_earlier_attempts_words_are_not_taken_for_this_ones(tmp_path):
    say = "import pathlib; it = pathlib.Path('{}'); print('second' if it.exists() else 'first'); it.touch(); exit(1)"
    made = process(tmp_path, say.format(tmp_path / "said"), restarts=RestartBudget(1, 60.0))
    made.start()
    made.wait(time.monotonic() + 10)
    assert made.ending().reason == "first"
    made.restart()
    made.wait(time.monotonic() + 10)
    assert made.ending().reason == "second"
    assert "first" in (tmp_path / "it.log").read_text()
    again = process(tmp_path, "pass")
    again.start()
    again.wait(time.monotonic() + 10)
    assert again.last_lines() == ""
