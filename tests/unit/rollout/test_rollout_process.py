"""The rollout's parts as its process wires them, around an engine without a model."""

import asyncio
import os
import signal
import time

import pytest
from prometheus_client import REGISTRY
from trivet.v1 import weights_pb2

from services.common.config import parse_config
from services.common.errors import Outage, Unavailable, Unreachable
from services.common.exit_codes import FAILED, FINISHED
from services.common.transport.client import connect
from services.common.transport.outages import Outages
from services.common.transport.weight_feed import WeightFeed
from services.rollout.__main__ import Rollout
from tests.support.broker import Broker
from tests.support.rollout.fakes import FakeEngine, make_prompt

pytestmark = pytest.mark.timeout(120)


class Process:
    def __init__(self, broker):
        config = parse_config(
            {
                "run": {"name": "run"},
                "redis": broker.config.model_dump() | {"retry_seconds": 0.5},
                "model": {"path": "m", "max_length": 2048},
                "data": {"train": {"kind": "jsonl", "path": "a.jsonl"}},
                "reward": {"scorers": [{"name": "exact_match"}]},
                "weights": {"transfer": "nccl"},
                "trainer": {"device": "auto"},
            }
        )
        self.engine, self.gave_up = FakeEngine(), asyncio.Event()
        self.engine.wait_gave_up = self.gave_up.wait
        self.outages = Outages(60, (Outage, Unreachable))
        self.rollout = Rollout(config, "r1", connect(config.redis), self.engine, self.outages)


@pytest.fixture
def broker(tmp_path):
    broker = Broker(tmp_path)
    yield broker
    broker.server.terminate()


async def until(condition):
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def arrived(broker):
    return sorted(group.prompt.group_id for group in broker.streams.samples("test").scan())


async def test_it_samples_through_outages_of_redis_and_ends_with_a_signal(broker):
    prompts, feed = broker.streams.prompts("trainer"), WeightFeed(broker.client, "run")
    feed.announce(weights_pb2.WeightVersion(version=1, fingerprint="one"))
    process = Process(broker)
    process.engine.weights = weights_pb2.WeightVersion(version=1, fingerprint="one")
    serving = asyncio.create_task(process.rollout.serve())
    prompts.add(make_prompt(group_id="before", min_version=1))
    await until(lambda: arrived(broker) == ["before"])
    # One whose samples are finished while nobody listens.
    process.engine.gate.clear()
    prompts.add(make_prompt(group_id="meanwhile"))
    await until(lambda: process.engine.running == 1)
    before = REGISTRY.get_sample_value("trivet_outages_total", {"code": "redis_unreachable"}) or 0.0
    await asyncio.to_thread(broker.server.stop)
    await until(lambda: process.outages.problem is not None)
    process.engine.gate.set()
    await until(lambda: process.engine.running == 0)
    await asyncio.to_thread(broker.server.start)
    await until(lambda: arrived(broker) == ["before", "meanwhile"])
    await until(lambda: process.outages.problem is None)
    assert REGISTRY.get_sample_value("trivet_outages_total", {"code": "redis_unreachable"}) > before
    # An emptied one.
    await asyncio.to_thread(broker.restart, 0, empty=True)
    feed.keep_announced()
    await asyncio.to_thread(prompts.read, 1, 0.01)
    prompts.add(make_prompt(group_id="after", min_version=1))
    await until(lambda: arrived(broker) == ["after"])
    assert len(process.engine.calls) == 3
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(serving, 10) == FINISHED
    assert process.engine.closed


async def test_a_stop_gives_back_its_prompts_within_five_seconds(broker):
    prompts = broker.streams.prompts("trainer")
    process = Process(broker)
    process.engine.gate.clear()
    serving = asyncio.create_task(process.rollout.serve())
    prompts.add(make_prompt())
    await until(lambda: process.engine.running == 1)
    started = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == FINISHED
    assert time.monotonic() - started < 5
    entries = await asyncio.to_thread(prompts.read, 5, 0.1)
    assert [(entry.message.group_id, entry.deliveries) for entry in entries] == [("g1", 1)]


async def test_a_signal_ends_it_while_it_waits_for_redis_at_its_start(broker):
    process = Process(broker)
    broker.server.stop()
    serving = asyncio.create_task(process.rollout.serve())
    await until(lambda: process.outages.problem is not None)
    started = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == FINISHED
    assert time.monotonic() - started < 5


async def test_an_engine_that_gives_up_ends_it(broker):
    process = Process(broker)
    serving = asyncio.create_task(process.rollout.serve())
    broker.streams.prompts("trainer").add(make_prompt())
    await until(lambda: process.engine.calls)
    process.engine.problem = "engine does not start"
    process.gave_up.set()
    assert await asyncio.wait_for(serving, 10) == FAILED


async def test_an_engine_that_does_not_start_ends_it(broker):
    process = Process(broker)

    async def launch():
        raise Unavailable("engine_start", "ValueError: no memory (vLLM did not start)")

    process.engine.launch = launch
    with pytest.raises(Unavailable, match="^ValueError: no memory"):
        await asyncio.wait_for(process.rollout.serve(), 10)
    assert process.engine.closed
