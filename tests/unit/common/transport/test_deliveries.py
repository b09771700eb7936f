"""An outage costs an entry no delivery: only a consumer that had it in hand, and ended, does."""

import time

import pytest
from trivet.v1 import sample_pb2

from services.common.transport import client as client_module
from services.common.transport import streams as streams_module
from services.common.transport.client import connect
from services.common.transport.dead_letters import DeadLetters
from services.common.transport.streams import RunStreams
from tests.support.broker import Broker

OUTAGES = 3
IDLE_SECONDS = 0.6
# Longer than an entry may be idle, and than any call takes.
OUTAGE_SECONDS = 0.8


@pytest.fixture
def broker(tmp_path, monkeypatch):
    monkeypatch.setattr(streams_module, "SLOW_SECONDS", IDLE_SECONDS / 2)
    broker = Broker(tmp_path, claim_idle_seconds=IDLE_SECONDS)
    yield broker
    broker.server.stop()


@pytest.mark.parametrize("call", ["claim", "read"])
def test_no_entry_that_is_worked_on_is_claimed_after_an_outage(broker, call):
    """Nobody could touch what it holds, whichever call waited for Redis meanwhile."""
    busy, other = broker.streams.prompts("busy"), broker.streams.prompts("other")
    busy.add(sample_pb2.Prompt(group_id="g"))
    (entry,) = busy.read(1, 1.0)
    for _ in range(OUTAGES):
        other._next_claim = 0.0 if call == "claim" else time.monotonic() + 1.0
        with broker.silent(OUTAGE_SECONDS):
            assert other.read(1, 0.01) == []
        assert other.read(1, 0.01) == []
        busy.touch([entry.id])
        assert broker.deliveries("prompts") == [1]


def test_an_entry_whose_consumer_ended_in_an_outage_is_claimed_once_all_could_touch_theirs(broker):
    dead, alive = broker.streams.prompts("dead"), broker.streams.prompts("alive")
    dead.add(sample_pb2.Prompt(group_id="g"))
    dead.read(1, 1.0)
    with broker.silent(OUTAGE_SECONDS):
        assert alive.read(1, 0.01) == []
    deadline = time.monotonic() + 10
    claimed = []
    while not claimed and time.monotonic() < deadline:
        claimed = alive.read(1, 0.1)
    assert [(entry.message.group_id, entry.deliveries) for entry in claimed] == [("g", 2)]


def test_a_call_that_is_repeated_over_an_outage_counts_one_delivery(broker, monkeypatch):
    """The server executes both, though the client gave up the first."""
    monkeypatch.setattr(client_module, "SOCKET_TIMEOUT_SECONDS", 0.2)
    streams = RunStreams(connect(broker.config), "run", broker.config)
    first = streams.scored("trainer")
    for request in range(2):
        first.add(sample_pb2.ScoredGroup(group=sample_pb2.Group(prompt=sample_pb2.Prompt(request=request))))
    first.read(2, 0.1)
    again = streams.scored("trainer")
    with broker.silent(1.0):
        recovered = [entry.message.group.prompt.request for entry in again.recover()]
    assert recovered == [0, 1]
    assert DeadLetters(broker.client, "run").read() == []
