import asyncio
from pathlib import Path

import pytest
from rollout_fakes import FakeEngine
from trivet.v1 import rollout_pb2, weights_pb2

from services.common.weights import WeightFeed
from services.rollout.delivery import Delivery
from services.rollout.engine import LoadFailed
from services.rollout.follower import WeightFollower

pytestmark = pytest.mark.timeout(60)


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
    task = asyncio.create_task(follower.run())
    yield follower
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_only_the_newest_announcement_is_loaded_at_the_start(engine, feed, follower):
    feed.announce(version(1))
    feed.announce(version(2))
    await follower.catch_up()
    assert engine.loaded == [2]


async def test_without_an_announcement_the_initial_weights_stay(engine, follower):
    await follower.catch_up()
    assert engine.loaded == []
    await asyncio.wait_for(follower.wait_for(3), 5)


async def test_a_prompt_waits_for_the_version_that_was_announced(engine, feed, following):
    feed.announce(version(4))
    await following.wait_for(4)
    assert engine.weights.version == 4


async def test_nobody_waits_for_what_was_not_announced(engine, feed, following):
    """After a roll-back the newest announcement can be older than what a prompt asks for."""
    feed.announce(version(2))
    await asyncio.wait_for(following.wait_for(9), 10)
    assert engine.weights.version == 2


async def test_a_lower_version_announced_later_is_loaded(engine, feed, following):
    feed.announce(version(5))
    await following.wait_for(5)
    feed.announce(version(3, "again"))
    # The announcement settles, though no version as new as 9 is ever loaded.
    await following.wait_for(9)
    assert engine.weights.version == 3
    assert engine.weights.fingerprint == "again"


async def test_a_failed_load_keeps_the_old_version_says_so_and_lets_prompts_go_on(engine, feed, following):
    engine.load_failures = [LoadFailed("weights_corrupt", "size is 3, expected 4")]
    feed.announce(version(6))
    await asyncio.wait_for(following.wait_for(6), 10)
    assert engine.weights.version == 0
    assert following.load_error == "version 6: size is 3, expected 4"
    feed.announce(version(7))
    await following.wait_for(7)
    assert engine.weights.version == 7
    assert following.load_error == ""


async def test_waiting_is_bounded(engine, feed):
    slow = WeightFollower(engine, feed, timeout_seconds=0.05, directory=Path("/w"))
    feed.announce(version(1))
    # Nobody runs the follower, so that the announcement never settles.
    await asyncio.wait_for(slow.wait_for(1), 5)
    assert engine.weights.version == 0


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
    await following.wait_for(2)
    assert engine.weights.version == 2
    assert engine.loaded == []


async def test_a_version_that_went_past_is_waited_for_by_nobody(engine, feed, following):
    feed.announce(version(1))
    await following.wait_for(1)
    feed.announce(in_memory(2))
    await asyncio.wait_for(following.wait_for(2), 5)
    assert engine.weights.version == 1
    assert engine.loaded == [1]
    assert following.load_error == ""


async def test_a_rollout_that_fell_back_takes_what_disk_has(engine, feed, following):
    feed.announce(version(3))
    await following.wait_for(3)
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
    await follower._settle(*late)
    assert engine.weights.version == 7
    assert engine.loaded == []


async def test_a_version_on_disk_after_a_failed_hand_over_takes_its_place(engine, feed, following):
    """Some rollouts have it from memory, under another name: all load the files."""
    await hand_over(following, in_memory(8))
    feed.announce(version(8))
    async with asyncio.timeout(5):
        while engine.loaded != [8]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
