import asyncio
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from redis.backoff import ExponentialBackoff
from trivet.v1 import rollout_pb2, weights_pb2

from services.common.errors import Unavailable
from services.common.transport.outages import Outages
from services.common.transport.weight_feed import WeightFeed
from services.rollout.engine.delivery import Delivery
from services.rollout.engine.protocol import LoadFailed
from services.rollout.weights.follower import WeightFollower
from tests.support.rollout.fakes import FakeEngine

pytestmark = pytest.mark.timeout(60)

# Of a prompt that was issued before, or after, whatever a test announces.
EARLIER, LATER = "1-0", f"{2**60}-0"
FAILURES = ("trivet_rollout_weights_load_failures_total", {"code": "weights_unreadable"})


def version(number, fingerprint=None):
    return weights_pb2.WeightVersion(version=number, fingerprint=fingerprint or f"f{number}", path=f"/w/{number}")


@pytest.fixture
def feed(redis_client, request):
    return WeightFeed(redis_client, f"follower-{request.node.name}")


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def follower(engine, feed):
    return WeightFollower(engine, feed, timeout_seconds=10, directory=Path("/w"))


@pytest.fixture
async def following(follower):
    task = asyncio.create_task(follower.run(Outages(60)))
    yield follower
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_only_the_newest_announcement_is_loaded_at_the_start(engine, feed, follower):
    feed.announce(version(1))
    feed.announce(version(2))
    await follower.catch_up()
    assert engine.loaded == [2]


async def test_without_an_announcement_the_initial_weights_stay_and_serve_the_first_prompts_only(engine, feed):
    """As after a restart, when Redis has lost its data: version 3 is not sampled from the base weights."""
    impatient = WeightFollower(engine, feed, timeout_seconds=0.05, directory=Path("/w"))
    await impatient.catch_up()
    assert engine.loaded == []
    await asyncio.wait_for(impatient.wait_for(0, LATER), 5)
    with pytest.raises(Unavailable, match="version 3 was not there within 0.05 seconds, the engine has 0") as refusal:
        await impatient.wait_for(3, LATER)
    assert refusal.value.code == "weights_behind"


@pytest.mark.parametrize("code", ["weights_corrupt", "weights_missing"])
async def test_a_damaged_version_is_reported_at_once_and_loaded_when_it_is_published_again(
    engine, feed, follower, code
):
    engine.load_failures = [LoadFailed(code, "v3 is damaged")]
    feed.announce(version(3))
    await follower.catch_up()
    assert feed.take_damaged()
    feed.announce(version(3))
    await follower.catch_up()
    assert engine.loaded == [3]
    assert not feed.take_damaged()


async def test_what_publishing_again_does_not_mend_is_not_reported(engine, feed, follower):
    for code in ("weights_refused", "weights_unreadable", "weights_timeout"):
        engine.load_failures = [LoadFailed(code, "no")]
        feed.announce(version(3))
        await follower.catch_up()
        assert not feed.take_damaged()


async def test_a_prompt_waits_until_the_lost_version_is_announced_again(engine, feed, following, redis_client):
    feed.announce(version(3))
    await following.wait_for(3, LATER)
    redis_client.delete(feed._name)
    engine.weights = weights_pb2.WeightVersion(version=0, fingerprint="base")
    restarted = WeightFollower(engine, feed, timeout_seconds=10, directory=Path("/w"))
    task = asyncio.create_task(restarted.run(Outages(60)))
    waiting = asyncio.create_task(restarted.wait_for(3, LATER))
    for _ in range(2):
        await restarted.catch_up()
    assert not waiting.done()
    feed.keep_announced()
    await asyncio.wait_for(waiting, 10)
    assert engine.weights.version == 3
    task.cancel()


async def test_a_prompt_waits_for_the_version_that_was_announced(engine, feed, following):
    feed.announce(version(4))
    await following.wait_for(4, LATER)
    assert engine.weights.version == 4


async def test_a_prompt_of_before_the_trainer_went_back_takes_what_there_is(engine, feed, following):
    """It asks for a version that may never come, and would keep from sampling those that the trainer needs first."""
    feed.announce(version(2))
    await asyncio.wait_for(following.wait_for(9, EARLIER), 10)
    assert engine.weights.version == 2


async def test_a_lower_version_announced_later_is_loaded(engine, feed, following):
    feed.announce(version(5))
    await following.wait_for(5, LATER)
    feed.announce(version(3, "again"))
    async with asyncio.timeout(5):
        while engine.weights.version != 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert engine.weights.fingerprint == "again"
    assert following.problem is None


async def test_a_failed_load_keeps_the_old_version_says_so_and_is_tried_again(engine, feed, following, monkeypatch):
    monkeypatch.setattr(following, "_backoff", ExponentialBackoff(cap=0.3, base=0.1))
    before = REGISTRY.get_sample_value(*FAILURES) or 0.0
    engine.load_failures = [LoadFailed("weights_unreadable", "Input/output error")] * 3
    feed.announce(version(6))
    async with asyncio.timeout(10):
        while not following.load_error:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert engine.weights.version == 0
    assert following.problem == "waiting for weights: version 6: Input/output error"
    await asyncio.wait_for(following.wait_for(6, LATER), 10)
    assert engine.loaded == [6]
    assert (following.load_error, following.problem) == ("", None)
    assert REGISTRY.get_sample_value(*FAILURES) == before + 3


async def test_a_version_that_breaks_the_engine_is_tried_no_more_than_the_engine_survives(
    engine, feed, follower, monkeypatch
):
    monkeypatch.setattr(follower, "_backoff", ExponentialBackoff(cap=0.0, base=0.0))
    engine.load_failures = [LoadFailed("weights_refused", "vLLM could not load it")] * 9
    feed.announce(version(6))
    for _ in range(9):
        await follower.catch_up()
    assert len(engine.load_failures) == 9 - 3
    assert follower.problem is not None
    engine.load_failures = []
    feed.announce(version(7))
    await follower.catch_up()
    assert (engine.loaded, follower.problem) == ([7], None)


async def test_an_engine_that_fell_back_is_brought_forward_without_another_announcement(engine, feed, following):
    feed.announce(version(3))
    await following.wait_for(3, LATER)
    engine.weights = weights_pb2.WeightVersion(version=0, fingerprint="base")
    await asyncio.wait_for(following.wait_for(3, LATER), 10)
    assert engine.loaded == [3, 3]


async def test_nothing_is_loaded_while_the_engine_starts_again(engine, feed, follower):
    engine.problem = "engine restarts"
    feed.announce(version(3))
    await follower.catch_up()
    assert engine.loaded == []
    engine.problem = None
    await follower.catch_up()
    assert engine.loaded == [3]


async def test_the_same_publication_is_loaded_once_and_another_of_its_number_again(engine, follower):
    assert await follower.load(version(1)) > 0
    assert await follower.load(version(1)) == 0
    await follower.load(version(1, "other"))
    assert engine.loaded == [1, 1]


async def test_a_caller_hears_of_a_failed_load(engine, follower):
    engine.load_failures = [LoadFailed("weights_missing", "gone")]
    with pytest.raises(LoadFailed, match="gone"):
        await follower.load(version(1))


def in_memory(number):
    return weights_pb2.WeightVersion(version=number, fingerprint=f"m{number}")


async def hand_over(follower, weights):
    delivery = Delivery(rollout_pb2.TransferBegin(group="g", weights=weights))
    delivery.finish()
    await follower.receive(delivery)


async def test_a_late_rollout_starts_with_the_newest_version_on_disk(engine, feed, follower):
    feed.announce(version(3))
    feed.announce(in_memory(4))
    feed.announce(in_memory(5))
    await follower.catch_up()
    assert engine.loaded == [3]


async def test_a_version_from_memory_is_there_when_it_is_announced(engine, feed, following):
    await hand_over(following, in_memory(2))
    feed.announce(in_memory(2))
    await following.wait_for(2, LATER)
    assert engine.weights.version == 2
    assert engine.loaded == []


async def test_a_version_that_went_past_is_what_the_rollout_waits_for(engine, feed, follower):
    feed.announce(version(1))
    await follower.catch_up()
    assert follower.problem is None
    feed.announce(in_memory(2))
    await follower.catch_up()
    assert follower.problem == "waiting for weights: version 2 went from memory to memory, past this engine"
    assert engine.loaded == [1]
    await hand_over(follower, in_memory(3))
    assert follower.problem is None
    await asyncio.wait_for(follower.wait_for(3, LATER), 5)


async def test_a_rollout_that_fell_back_takes_what_disk_has(engine, feed, following):
    feed.announce(version(3))
    await following.wait_for(3, LATER)
    # Its engine was started again under the initial weights.
    engine.weights = weights_pb2.WeightVersion(version=0, fingerprint="base")
    feed.announce(in_memory(4))
    async with asyncio.timeout(5):
        while engine.weights.version != 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_an_announcement_read_late_does_not_undo_a_newer_version_from_memory(engine, feed, follower):
    feed.announce(version(6))
    late = feed.latest()
    await hand_over(follower, in_memory(7))
    await follower._look(lambda: late)
    assert engine.weights.version == 7
    assert engine.loaded == []


async def test_a_version_on_disk_after_a_failed_hand_over_takes_its_place(engine, feed, following):
    """Some rollouts have it from memory, under another name: all load the files."""
    await hand_over(following, in_memory(8))
    feed.announce(version(8))
    async with asyncio.timeout(5):
        while engine.loaded != [8]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_nothing_is_sampled_under_a_version_that_the_trainer_has_gone_back_from(engine, feed, follower):
    feed.announce(version(40))
    await follower.catch_up()
    feed.announce(version(20))
    waiting = asyncio.create_task(follower.wait_for(20, LATER))
    async with asyncio.timeout(5):
        while follower._newest[1].version != 20:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not waiting.done()
    await follower.catch_up()
    await asyncio.wait_for(waiting, 5)
    assert engine.weights.version == 20


async def test_a_version_from_memory_serves_before_it_is_announced(engine, feed, follower):
    feed.announce(version(6))
    await hand_over(follower, in_memory(7))
    await asyncio.wait_for(follower.wait_for(6, EARLIER), 5)
    assert engine.weights.version == 7
