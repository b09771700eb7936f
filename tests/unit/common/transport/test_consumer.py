"""The loop that rollout and reward share, over a real Redis."""

import asyncio
import time

import pytest
from prometheus_client import REGISTRY
from trivet.v1 import sample_pb2

from services.common.errors import InvalidData, Outage, TrivetError, Unavailable, Unreachable
from services.common.transport import consumer as consumer_module
from services.common.transport import outages as outages_module
from services.common.transport.client import connect
from services.common.transport.consumer import Consumer, Failed, Finished, GivenBack, Lost
from services.common.transport.dead_letters import DeadLetters
from services.common.transport.outages import Outages
from services.common.transport.streams import RunStreams
from tests.support.broker import Broker

pytestmark = pytest.mark.timeout(60)

# Where no consumer holds an entry for long.
SOON_IDLE = pytest.mark.parametrize("idle_seconds", [0.2])
ERROR = TrivetError("a_code", "a reason")


class Run:
    """A consumer of prompts; `outcomes` has what becomes of a prompt where that is not a group of its id."""

    def __init__(self, client, config, *, name="a", concurrency=3, grace_seconds=0.1, limit_seconds=30.0):
        self.client = client
        self.streams = RunStreams(client, "run", config)
        self.prompts, self.samples = self.streams.prompts("trainer"), self.streams.samples("reward")
        self.outages = Outages(limit_seconds, (Outage, Unreachable))
        self.outcomes, self.handled, self.running, self.most_running, self.looks = {}, [], 0, 0, 0
        self.gate, self.stop, self.ready = asyncio.Event(), asyncio.Event(), True
        self.gate.set()
        self.consumer = Consumer(
            self.streams.prompts(name),
            self.streams.samples(name),
            self.handle,
            concurrency=concurrency,
            outages=self.outages,
            grace_seconds=grace_seconds,
            ready=lambda: self.ready,
        )
        self.collect, self.consumer._collect = self.consumer._collect, self.look

    def look(self, touching):
        self.looks += 1
        self.collect(touching)

    async def handle(self, entry):
        group_id = entry.message.group_id
        self.handled.append((group_id, entry.deliveries))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.gate.wait()
        finally:
            self.running -= 1
        planned = self.outcomes.get(group_id, [])
        outcome = planned.pop(0) if planned else Finished(sample_pb2.Group(prompt=entry.message))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def add(self, *group_ids):
        for group_id in group_ids:
            self.prompts.add(sample_pb2.Prompt(group_id=group_id))

    async def until(self, condition):
        async with asyncio.timeout(20):
            # Another client's writes give no event here.
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def until_it_has_looked(self):
        """Several times, at what it could do next."""
        enough = self.looks + 4
        await self.until(lambda: self.looks >= enough)

    async def until_finished(self, *group_ids):
        await self.until(lambda: sorted(group.prompt.group_id for group in self.samples.scan()) == sorted(group_ids))

    def letters(self):
        return {letter.group_id: letter for letter in DeadLetters(self.client, "run").read()}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(consumer_module, "READ_SECONDS", 0.05)
    monkeypatch.setattr(outages_module, "FIRST_SECONDS", 0.01)


@pytest.fixture
def idle_seconds():
    """After so long Redis gives an entry away."""
    return 0.8


@pytest.fixture
def config(redis_config, idle_seconds):
    return redis_config.model_copy(update={"claim_idle_seconds": idle_seconds})


@pytest.fixture
async def run(redis_client, config):
    run = Run(redis_client, config)
    run.task = asyncio.create_task(run.consumer.run(run.stop))
    yield run
    run.gate.set()
    run.stop.set()
    await run.task


def rebuilds():
    return REGISTRY.get_sample_value("trivet_stream_rebuilds_total", {"stream": "prompts"}) or 0.0


@pytest.fixture
def broker(tmp_path):
    broker = Broker(tmp_path, claim_idle_seconds=0.6)
    yield broker
    broker.server.stop()


async def test_what_is_finished_is_passed_on(run):
    run.add("g1", "g2", "g3", "g4", "g5")
    await run.until_finished("g1", "g2", "g3", "g4", "g5")
    assert (run.prompts.depth(), run.prompts.pending()) == (0, 0)
    assert len(run.handled) == 5


async def test_what_failed_is_a_dead_letter_and_the_next_is_handled(run):
    run.outcomes = {"bad": [Failed(ERROR)]}
    run.add("bad", "good")
    await run.until_finished("good")
    await run.until(lambda: run.prompts.depth() == 0)
    letter = run.letters()["bad"]
    assert (letter.code, letter.reason, letter.stream, letter.deliveries) == ("a_code", "a reason", "prompts", 1)
    assert sample_pb2.Prompt.FromString(letter.payload).group_id == "bad"


@SOON_IDLE
async def test_what_is_lost_is_delivered_again(run):
    run.outcomes = {"g": [Lost(ERROR)]}
    run.add("g")
    await run.until_finished("g")
    assert run.handled == [("g", 1), ("g", 2)]
    assert run.letters() == {}


@SOON_IDLE
async def test_what_is_always_lost_is_given_up(run):
    run.outcomes = {"g": [Lost(ERROR)] * 9}
    run.add("g")
    await run.until(lambda: run.prompts.depth() == 0)
    assert run.letters()["g"].code == "too_many_deliveries"
    assert len(run.handled) == 2  # redis.max_deliveries


@SOON_IDLE
async def test_what_is_given_back_costs_no_delivery(run):
    run.outcomes = {"g": [GivenBack(ERROR)] * 5}
    run.add("g")
    await run.until_finished("g")
    assert run.handled == [("g", 1)] * 6
    assert run.letters() == {}


async def test_no_more_than_allowed_are_handled_at_once(run):
    run.gate.clear()
    run.add(*"abcdefgh")
    await run.until(lambda: run.running == 3)
    await run.until_it_has_looked()
    assert run.prompts.pending() == 3
    run.gate.set()
    await run.until_finished(*"abcdefgh")
    assert run.most_running == 3


async def test_what_takes_long_is_not_claimed_by_another(run, idle_seconds):
    run.gate.clear()
    run.add("g")
    await run.until(lambda: run.running == 1)
    other = run.streams.prompts("b")
    until = time.monotonic() + 1.5 * idle_seconds
    while time.monotonic() < until:
        assert await asyncio.to_thread(other.read, 5, 0.05) == []
    run.gate.set()
    await run.until_finished("g")
    assert run.handled == [("g", 1)]


@pytest.mark.parametrize("how", ["not ready", "paused"])
async def test_nothing_is_taken_meanwhile_and_what_was_is_finished(run, how):
    def hold(on):
        run.ready, run.consumer.paused = (not on, False) if how == "not ready" else (True, on)

    run.gate.clear()
    run.add("before")
    await run.until(lambda: run.running == 1)
    hold(True)
    # A look that had begun may still take something.
    await run.until_it_has_looked()
    run.add("after")
    run.gate.set()
    await run.until_finished("before")
    await run.until_it_has_looked()
    assert run.prompts.depth() == 1
    assert len(run.handled) == 1
    hold(False)
    await run.until_finished("before", "after")


async def test_a_stop_finishes_what_it_can(redis_client, config):
    run = Run(redis_client, config, grace_seconds=10)
    task = asyncio.create_task(run.consumer.run(run.stop))
    run.gate.clear()
    run.add("g")
    await run.until(lambda: run.running == 1)
    run.stop.set()
    # Nothing tells that it waits; it would end at once.
    assert (await asyncio.wait({task}, timeout=0.1))[0] == set()
    run.gate.set()
    await task
    await run.until_finished("g")


async def test_a_stop_gives_back_the_rest(run):
    run.gate.clear()
    run.add("g1", "g2")
    await run.until(lambda: run.running == 2)
    run.stop.set()
    await run.task
    # Nobody waits until they are idle, and the delivery does not count.
    entries = await asyncio.to_thread(run.streams.prompts("b").read, 5, 0.1)
    assert [(entry.message.group_id, entry.deliveries) for entry in entries] == [("g1", 1), ("g2", 1)]


async def test_what_a_stop_finds_just_read_is_given_back(redis_client, config, monkeypatch):
    run = Run(redis_client, config)
    read, loop = run.consumer._source.read, asyncio.get_running_loop()

    def late(*arguments):
        loop.call_soon_threadsafe(run.stop.set)
        return read(*arguments)

    monkeypatch.setattr(run.consumer._source, "read", late)
    run.add("g")
    await run.consumer.run(run.stop)
    entries = await asyncio.to_thread(run.streams.prompts("b").read, 5, 0.1)
    assert [(entry.message.group_id, entry.deliveries) for entry in entries] == [("g", 1)]
    assert run.handled == []


@pytest.mark.parametrize(
    ("error", "deliveries"), [(ZeroDivisionError("a bug"), 2), (Unavailable("scorers", "no process starts"), 1)]
)
async def test_what_a_handler_raises_ends_the_consumer(redis_client, config, error, deliveries):
    """The entry's delivery counts unless the handler only waited for something."""
    run = Run(redis_client, config)
    run.outcomes = {"g": [error]}
    run.add("g")
    with pytest.raises(type(error), match=str(error)):
        await asyncio.wait_for(run.consumer.run(run.stop), 20)
    claimed = []
    async with asyncio.timeout(10):
        while not claimed:
            claimed = await asyncio.to_thread(run.streams.prompts("b").read, 1, 0.1)
    assert [entry.deliveries for entry in claimed] == [deliveries]


@SOON_IDLE
async def test_a_full_redis_costs_no_entry_and_does_not_end_the_consumer(run, idle_seconds):
    """For longer than an entry may be idle."""
    run.outcomes = {"bad": [Failed(InvalidData("a_code", "no"))]}
    run.gate.clear()
    run.add("g", "bad")
    await run.until(lambda: run.running == 2)
    run.client.config_set("maxmemory", 1)
    try:
        run.gate.set()
        await run.until(lambda: run.outages.problem is not None)
        await asyncio.sleep(2 * idle_seconds)
    finally:
        run.client.config_set("maxmemory", 0)
    await run.until_finished("g")
    await run.until(lambda: run.prompts.depth() == 0)
    assert set(run.letters()) == {"bad"}
    assert len(run.handled) == 2


async def test_a_full_consumer_outlives_a_flushed_redis(redis_client, config):
    run = Run(redis_client, config, concurrency=1)
    task = asyncio.create_task(run.consumer.run(run.stop))
    run.gate.clear()
    run.add("g")
    await run.until(lambda: run.running == 1)
    before = rebuilds()
    run.client.flushall()
    await run.until(lambda: rebuilds() > before)
    run.gate.set()
    await run.until_finished("g")
    run.add("after")
    await run.until_finished("g", "after")
    run.stop.set()
    await task


async def test_an_unreachable_redis_costs_no_delivery_and_does_not_end_the_consumers(broker):
    """Two of them, each with an entry in hand, through outages that are longer than an entry may be idle."""
    config = broker.config.model_copy(update={"retry_seconds": 0.5})
    runs = [Run(connect(config), config, name=name, concurrency=1) for name in "ab"]
    for run in runs:
        run.gate.clear()
        run.add("g")
    tasks = [asyncio.create_task(run.consumer.run(run.stop)) for run in runs]
    await runs[0].until(lambda: all(run.running for run in runs))
    before = REGISTRY.get_sample_value("trivet_outages_total", {"code": "redis_unreachable"}) or 0.0
    for _ in range(2):
        await asyncio.to_thread(broker.restart, 1.5 * config.claim_idle_seconds)
        # So long that what nobody touched would have been claimed.
        await asyncio.sleep(1.5 * config.claim_idle_seconds)
        assert await asyncio.to_thread(broker.deliveries, "prompts") == [1, 1]
    assert REGISTRY.get_sample_value("trivet_outages_total", {"code": "redis_unreachable"}) > before
    for run in runs:
        run.gate.set()
    await runs[0].until_finished("g", "g")
    assert [run.handled for run in runs] == [[("g", 1)]] * 2
    assert not any(run.outages.problem for run in runs)
    for run in runs:
        run.stop.set()
    await asyncio.gather(*tasks)


async def test_a_stop_does_not_wait_for_redis(broker):
    run = Run(broker.client, broker.config)
    task = asyncio.create_task(run.consumer.run(run.stop))
    run.gate.clear()
    run.add("g")
    await run.until(lambda: run.running == 1)
    with broker.silent(5):
        started = time.monotonic()
        run.stop.set()
        await task
        assert time.monotonic() - started < 4


async def test_an_outage_over_the_limit_ends_the_consumer(redis_client, config, monkeypatch):
    run = Run(redis_client, config, limit_seconds=0.0)

    def full(*_):
        raise Outage("redis_memory", "Redis is full")

    monkeypatch.setattr(run.consumer._source, "forward", full)
    run.add("g")
    with pytest.raises(Outage, match="Redis is full"):
        await asyncio.wait_for(run.consumer.run(run.stop), 20)
    entries = await asyncio.to_thread(run.streams.prompts("b").read, 5, 0.1)
    assert [(entry.message.group_id, entry.deliveries) for entry in entries] == [("g", 1)]
