"""What reaches a service's log, whoever says it."""

import json
import subprocess
import sys

import pytest

START = """
import asyncio, logging, resource, signal, sys, threading
from services.common.logs import configure_logs, get_logger
configure_logs("reward", "run")
ADDRESS = "redis://:hunter2@host:6379/0?password=hunter2"
"""


def lines(program: str, **options) -> list[dict]:
    ended = subprocess.run([sys.executable, "-c", START + program], stderr=subprocess.PIPE, text=True, check=False)
    assert "hunter2" not in ended.stderr
    return [json.loads(line) for line in ended.stderr.splitlines()]


def raised(how: str) -> str:
    return f"""
def fail():
    try:
        raise OSError(ADDRESS)
    except OSError as cause:
        error = ValueError("cannot reach " + ADDRESS)
        error.add_note("tried " + ADDRESS)
        raise error from cause
{how}
"""


@pytest.mark.parametrize("library", ["redis.connection", "botocore.endpoint", "uvicorn.error", "grpc._channel"])
def test_what_a_library_logs_is_a_line_like_any_other_without_its_secrets(library):
    (line,) = lines(
        f"""
logging.getLogger({library!r}).warning("no answer from %s", ADDRESS)
logging.getLogger({library!r}).info("not of interest")
"""
    )
    assert (line["event"], line["module"], line["level"]) == (
        "no answer from redis://***@host:6379/0?password=***",
        library,
        "warning",
    )
    assert (line["service"], line["run"]) == ("reward", "run")


def test_what_nobody_catches_is_the_reason_of_the_end_with_notes_and_causes():
    (line,) = lines(raised("fail()"))
    assert (line["event"], line["exit_code"]) == ("ended", 1)
    assert line["reason"] == "ValueError: cannot reach redis://***@host:6379/0?password=***"
    for part in ("OSError: redis://***@host", "tried redis://***@host", "direct cause"):
        assert part in line["exception"]


def test_a_thread_or_task_that_ends_by_itself_is_reported():
    (line,) = lines(raised("thread = threading.Thread(target=fail, name='t'); thread.start(); thread.join()"))
    assert (line["event"], line["thread"]) == ("a thread ended", "t")
    found = lines(
        raised(
            "async def task(): fail()\nasync def main():\n    made = asyncio.create_task(task())\n"
            "    await asyncio.wait([made])\n    del made\nasyncio.run(main())"
        )
    )
    assert found[0]["module"] == "asyncio"
    assert "redis://***@host" in found[0]["exception"]


def test_what_is_logged_of_an_exception_or_by_a_secrets_name_is_hidden():
    found = lines(raised("try: fail()\nexcept ValueError: get_logger('m').exception('oops', token='hunter2')"))
    assert found[0]["token"] == "***"


def test_control_characters_of_anyone_are_escaped():
    (line,) = lines("get_logger('m').info('a\\x1b[2Jb\\x9b31m\\rc', name='x' * 100_000)")
    assert line["event"] == "a\x1b[2Jb\x9b31m\rc"
    ended = subprocess.run(
        [sys.executable, "-c", START + "get_logger('m').info('a\\x1b[2Jb\\x9b31m\\rc')"],
        stderr=subprocess.PIPE,
        check=True,
    )
    assert ended.stderr.isascii()
    assert b"\x1b" not in ended.stderr
    assert b"\r" not in ended.stderr


def test_a_full_disk_ends_nothing_and_the_next_line_is_whole(tmp_path):
    """The kernel takes a part of a line, then nothing, and then there is space again."""
    log = tmp_path / "reward.log"
    program = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
logger = get_logger("m")
logger.info("first")
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (sys.stderr.buffer.tell() + 20, hard))
for _ in range(3):
    logger.info("lost")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
logger.info("last")
"""
    with log.open("ab") as file:
        subprocess.run([sys.executable, "-c", START + program], stderr=file, check=True)
    first, torn, last = log.read_text(encoding="utf-8").splitlines()
    assert len(torn) == 20
    assert [json.loads(line)["event"] for line in (first, last)] == ["first", "last"]
