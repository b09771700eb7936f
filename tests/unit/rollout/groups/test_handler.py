import asyncio
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import REGISTRY
from trivet.v1 import sample_pb2, weights_pb2

from services.common.config import BlobConfig
from services.common.errors import InvalidData, Outage
from services.common.transport.blobs import Blob, open_blobs
from services.common.transport.consumer import Failed, Finished, GivenBack, Lost
from services.common.transport.outages import Outages
from services.common.transport.streams import Entry
from services.common.transport.weight_feed import WeightFeed
from services.common.wire.replay_data import decode_replay
from services.rollout.engine.protocol import EngineFailed, LoadFailed, NotServed
from services.rollout.groups.handler import PromptHandler
from services.rollout.groups.sampler import GroupSampler
from services.rollout.weights.follower import WeightFollower
from tests.support.rollout.fakes import FakeEngine, make_prompt

pytestmark = pytest.mark.timeout(60)

# Of a prompt that was issued after whatever a test announces.
LATER = f"{2**60}-0"
NEW = weights_pb2.WeightVersion(version=1, fingerprint="new", path="/w/1")


class Rollout:
    def __init__(self, client, run):
        self.engine = FakeEngine()
        self.feed = WeightFeed(client, run)
        self.blobs = open_blobs(BlobConfig(), client, run)
        self.follower = WeightFollower(self.engine, self.feed, timeout_seconds=10, directory=Path("/w"))
        self.sampler = GroupSampler(self.engine, rollout_id="r1", code="c", config="k")
        self.outages = Outages(limit_seconds=30)
        self.handler = PromptHandler(self.sampler, self.follower, self.blobs, self.outages)

    async def handle(self, **changes):
        return await asyncio.wait_for(self.handler(Entry(LATER, make_prompt(**changes), 1)), 20)

    async def until(self, condition):
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
def rollout(redis_client):
    return Rollout(redis_client, "rollout")


@pytest.fixture
async def following(rollout):
    task = asyncio.create_task(rollout.follower.run(rollout.outages))
    yield rollout
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def failures(code):
    return REGISTRY.get_sample_value("trivet_rollout_failures_total", {"code": code}) or 0.0


async def test_a_prompt_becomes_a_group_with_replay(rollout):
    outcomes = [await rollout.handle(group_id=f"g{number}", token_ids=[number, 2, 3]) for number in range(5)]
    for number, outcome in enumerate(outcomes):
        group = outcome.message
        assert group.prompt.group_id == f"g{number}"
        assert len(group.samples) == 2
        for sample in group.samples:
            replay = decode_replay(
                rollout.blobs.get(Blob(sample.sample_id, sample.replay)),
                sample_id=sample.sample_id,
                prompt_length=3,
                token_ids=np.asarray(sample.token_ids, np.int32),
            )
            assert replay.routing.shape == (6, 2, 2)
    assert (rollout.sampler.tally.groups, rollout.sampler.tally.samples, rollout.sampler.tally.tokens) == (5, 10, 40)
    assert rollout.sampler.tally.tokens_per_second() > 0


async def test_evaluation_is_sampled_without_recording(rollout):
    greedy = sample_pb2.SamplingParameters(temperature=0, top_p=1, max_tokens=4)
    outcome = await rollout.handle(purpose=sample_pb2.PURPOSE_EVALUATION, sampling=greedy)
    assert not any(sample.HasField("replay") for sample in outcome.message.samples)
    assert rollout.engine.calls[0][2] is False


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"token_ids": list(range(15))}, "prompt_too_long"),
        ({"token_ids": []}, "prompt_empty"),
        ({"token_ids": [1, 500]}, "token_out_of_range"),
    ],
)
async def test_a_bad_prompt_has_failed(rollout, changes, code):
    before = failures(code)
    outcome = await rollout.handle(**changes)
    assert (type(outcome), outcome.error.code) == (Failed, code)
    assert failures(code) == before + 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidData("request_refused", "the engine refuses it"), Failed),
        (EngineFailed("engine_dead", "gone"), Lost),
        (NotServed("engine_restarted", "engine restarts"), GivenBack),
    ],
)
async def test_why_there_is_no_group_decides_what_becomes_of_the_prompt(rollout, error, kind):
    before = failures(error.code)
    rollout.engine.failures = [error]
    assert await rollout.handle() == kind(error)
    assert failures(error.code) == before + 1
    assert type(await rollout.handle()) is Finished


async def test_an_unexpected_failure_is_raised(rollout):
    rollout.engine.failures = [ZeroDivisionError("a bug")]
    with pytest.raises(ZeroDivisionError, match="a bug"):
        await rollout.handle()


async def test_a_full_blob_store_costs_no_sample(rollout, monkeypatch):
    put, full = rollout.blobs.put, asyncio.Event()
    full.set()

    def limited(sample_id, data):
        if full.is_set():
            raise Outage("blob_store", "no space left on device")
        return put(sample_id, data)

    monkeypatch.setattr(rollout.blobs, "put", limited)
    before = REGISTRY.get_sample_value("trivet_outages_total", {"code": "blob_store"}) or 0.0
    handling = [asyncio.create_task(rollout.handle(group_id=f"g{number}")) for number in range(3)]
    await rollout.until(lambda: rollout.outages.problem == "waiting: no space left on device")
    full.clear()
    assert [type(outcome) for outcome in await asyncio.gather(*handling)] == [Finished] * 3
    assert len(rollout.engine.calls) == 3
    assert rollout.outages.problem is None
    assert REGISTRY.get_sample_value("trivet_outages_total", {"code": "blob_store"}) == before + 1


async def test_a_prompt_is_sampled_under_the_version_it_asks_for(following):
    assert (await following.handle()).message.lineage.weights == "base"
    waiting = asyncio.create_task(following.handle(min_version=1))
    for _ in range(2):
        await following.follower.catch_up()
    assert not waiting.done()
    following.feed.announce(NEW)
    assert (await waiting).message.lineage.weights == "new"


async def test_samples_of_an_engine_that_fell_back_meanwhile_are_drawn_again(following):
    base = following.engine.weights
    following.feed.announce(NEW)
    await following.until(lambda: following.engine.weights.version == 1)
    following.engine.gate.clear()
    handling = asyncio.create_task(following.handle(min_version=1))
    await following.until(lambda: following.engine.running == 1)
    # Started again under the first weights, and not yet brought forward.
    following.engine.problem, following.engine.weights = "engine restarts", base
    following.engine.gate.set()
    await following.until(lambda: following.engine.running == 0)
    for _ in range(2):
        await following.follower.catch_up()
    assert not handling.done()
    following.engine.problem = None
    assert (await handling).message.lineage.weights == "new"
    assert len(following.engine.calls) == 2


async def test_no_prompts_are_wanted_while_the_engine_or_the_newest_weights_are_missing(rollout):
    assert rollout.handler.is_ready()
    rollout.engine.problem = "engine restarts"
    assert not rollout.handler.is_ready()
    rollout.engine.problem = None
    rollout.engine.load_failures = [LoadFailed("weights_unreadable", "Input/output error")]
    rollout.feed.announce(NEW)
    await rollout.follower.catch_up()
    assert not rollout.handler.is_ready()
    # Not before it is due again.
    await rollout.follower.catch_up()
    assert not rollout.handler.is_ready()
    rollout.follower._next_try = 0.0
    await rollout.follower.catch_up()
    assert rollout.handler.is_ready()
