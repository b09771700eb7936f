"""What a follower does while Redis is away, and when it comes back without what it held."""

import asyncio
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from trivet.v1 import rollout_pb2, weights_pb2

from services.common.errors import Outage, Unreachable
from services.common.transport.client import connect
from services.common.transport.outages import Outages
from services.common.transport.weight_feed import WeightFeed
from services.rollout.engine.delivery import Delivery
from services.rollout.engine.protocol import NotServed
from services.rollout.weights.follower import WeightFollower
from tests.support.broker import Broker
from tests.support.rollout.fakes import FakeEngine

pytestmark = pytest.mark.timeout(60)

# Of a prompt that is issued later than anything else.
LATER = f"{2**60}-0"
# Of a Redis on a machine whose clock is ahead.
AHEAD = f"{2**50}-0"


def version(number):
    return weights_pb2.WeightVersion(version=number, fingerprint=f"f{number}", path=f"/w/{number}")


class Failing:
    """A feed that raises what `failures` holds, one for each call, and then serves."""

    def __init__(self, feed):
        self.feed, self.failures = feed, []

    def __getattr__(self, name):
        if self.failures:
            raise self.failures.pop(0)
        return getattr(self.feed, name)


def counted(code):
    return REGISTRY.get_sample_value("trivet_outages_total", {"code": code}) or 0.0


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def outages():
    return Outages(30, (Outage, Unreachable))


@pytest.fixture
def feed(redis_client):
    return Failing(WeightFeed(redis_client, "outages"))


@pytest.fixture
def follower(engine, feed):
    return WeightFollower(engine, feed, timeout_seconds=0.3, directory=Path("/w"))


@pytest.fixture
async def following(follower, outages):
    task = follower.task = asyncio.create_task(follower.run(outages))
    yield follower
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    "error",
    [
        Unreachable("redis_unreachable", "connection refused"),
        Outage("redis_loading", "LOADING"),
        Outage("redis_readonly", "READONLY"),
    ],
)
async def test_an_outage_is_counted_and_over_with_the_next_answer(engine, feed, following, outages, error):
    """It was not: a follower that never returns never said that its outage had ended."""
    before = counted(error.code)
    for _ in range(2):
        feed.failures = [error, error]
        await until(lambda: outages.problem is not None)
        await until(lambda: outages.problem is None)
    assert counted(error.code) == before + 2
    feed.feed.announce(version(1))
    await until(lambda: engine.loaded == [1])


async def test_only_an_outage_over_the_limit_ends_it(feed, follower):
    feed.failures = [Unreachable("redis_unreachable", "connection refused")] * 9
    with pytest.raises(Unreachable, match="connection refused"):
        await asyncio.wait_for(follower.run(Outages(0.0, (Unreachable,))), 20)


async def test_it_resumes_with_a_redis_that_was_restarted(engine, outages, tmp_path):
    broker = Broker(tmp_path, retry_seconds=0.5)
    feed = WeightFeed(connect(broker.config), "run")
    follower = WeightFollower(engine, feed, timeout_seconds=10, directory=Path("/w"))
    task = asyncio.create_task(follower.run(outages))
    feed.announce(version(1))
    await until(lambda: engine.loaded == [1])
    await asyncio.to_thread(broker.server.stop)
    await until(lambda: outages.problem is not None)
    await asyncio.to_thread(broker.server.start)
    feed.announce(version(2))
    await until(lambda: engine.loaded == [1, 2])
    await asyncio.to_thread(broker.restart, 0, empty=True)
    await until(lambda: follower.problem is not None)
    feed.keep_announced()
    await until(lambda: follower.problem is None)
    assert engine.loaded == [1, 2]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    broker.server.stop()


async def test_nothing_is_sampled_while_redis_has_lost_which_version_is_the_newest(
    engine, feed, following, redis_client
):
    feed.feed.announce(version(3))
    await following.wait_for(3, LATER)
    redis_client.flushdb()
    await until(lambda: following.problem is not None)
    assert following.problem.startswith("waiting for weights: Redis has lost the announcements")
    with pytest.raises(NotServed, match="Redis has lost the announcements"):
        await following.wait_for(3, LATER)
    # What was drawn before is passed on.
    assert following.serves(3, 3, LATER)
    feed.feed.keep_announced()
    await until(lambda: following.problem is None)
    await following.wait_for(3, LATER)
    assert engine.loaded == [3]


async def test_an_announcement_in_an_emptied_redis_counts_whatever_its_id(engine, feed, following, redis_client):
    """Its clock may be behind that of the one before: prompts of now would look older than a version of before."""
    redis_client.xadd("outages:weights", {"message": version(5).SerializeToString()}, id=AHEAD)
    await until(lambda: engine.loaded == [5])
    redis_client.flushdb()
    feed.feed.announce(version(4))
    prompt = redis_client.xadd("outages:prompts", {"a": "b"}).decode()
    await until(lambda: engine.loaded == [5, 4])
    assert following.problem is None
    assert not following.serves(4, 5, prompt)


async def test_a_version_from_memory_counts_though_redis_does_not_answer(engine, feed, follower):
    feed.feed.announce(version(6))
    await follower.catch_up()
    feed.failures = [Unreachable("redis_unreachable", "connection refused")]
    delivery = Delivery(
        rollout_pb2.TransferBegin(group="g", weights=weights_pb2.WeightVersion(version=7, fingerprint="m7"))
    )
    delivery.finish()
    await follower.receive(delivery)
    assert (follower.problem, follower.serves(7, 7, LATER)) == (None, True)
    await follower.catch_up()
    assert (engine.loaded, engine.weights.version) == ([6], 7)
