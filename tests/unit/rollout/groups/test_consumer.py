import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import REGISTRY
from trivet.v1 import sample_pb2, weights_pb2

from services.common.config import parse_config
from services.common.errors import InvalidData, Outage
from services.common.transport.blobs import Blob, open_blobs
from services.common.transport.dead_letters import DeadLetters
from services.common.transport.outages import Outages
from services.common.transport.streams import RunStreams
from services.common.transport.weight_feed import WeightFeed
from services.common.wire.replay_data import decode_replay
from services.rollout.engine.protocol import EngineFailed, LoadFailed, NotServed
from services.rollout.groups.consumer import PromptWorker
from services.rollout.groups.sampler import GroupSampler
from services.rollout.weights.follower import WeightFollower
from tests.support.rollout_fakes import FakeEngine, make_prompt

pytestmark = pytest.mark.timeout(60)


class System:
    """One worker over a real Redis; `trainer` and `reward` stand at the far ends of its streams."""

    def __init__(self, client, redis_config, run):
        self.config = parse_config(
            {
                "run": {"name": run},
                "redis": redis_config.model_dump(),
                "model": {"path": "m", "max_length": 2048},
                "data": {"train": {"kind": "jsonl", "path": "a.jsonl"}},
                "reward": {"scorers": [{"name": "exact_match"}]},
                "rollout": {"concurrent_groups": 3},
            }
        )
        streams = RunStreams(client, run, redis_config)
        self.engine = FakeEngine()
        self.trainer, self.reward = streams.prompts("trainer"), streams.samples("reward")
        self.dead = DeadLetters(client, run)
        self.feed = WeightFeed(client, run)
        self.blobs = open_blobs(self.config.blobs, client, run)
        self.follower = WeightFollower(self.engine, self.feed, timeout_seconds=10, directory=Path("/w"))
        self.sampler = GroupSampler(self.engine, rollout_id="r1", code="c", config="k")
        self.outages = Outages(limit_seconds=30)
        self.worker = PromptWorker(
            self.config,
            sampler=self.sampler,
            follower=self.follower,
            prompts=streams.prompts("r1"),
            samples=streams.samples("r1"),
            blobs=self.blobs,
            outages=self.outages,
        )
        self.received = []

    async def receive(self, count):
        """Groups by id, once `count` have come."""
        deadline = time.monotonic() + 20
        while len(self.received) < count and time.monotonic() < deadline:
            entries = await asyncio.to_thread(self.reward.read, 10, 0.1)
            self.reward.ack([entry.id for entry in entries])
            self.received += [entry.message for entry in entries]
        assert len(self.received) == count
        return {group.prompt.group_id: group for group in self.received}

    async def until(self, condition):
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


@pytest.fixture
def system(redis_client, redis_config, request):
    return System(redis_client, redis_config, "worker-" + request.node.name[:40].replace("_", "-"))


@pytest.fixture
async def running(system):
    task = system.task = asyncio.create_task(system.worker.run())
    yield system
    await system.worker.drain(0)
    await system.worker.abandon()
    await task


def failures(code):
    return REGISTRY.get_sample_value("trivet_rollout_failures_total", {"code": code}) or 0.0


async def test_prompts_become_groups_with_replay(running):
    for number in range(5):
        running.trainer.add(make_prompt(group_id=f"g{number}", token_ids=[number, 2, 3]))
    groups = await running.receive(5)
    assert sorted(groups) == [f"g{number}" for number in range(5)]
    for group in groups.values():
        assert len(group.samples) == 2
        for sample in group.samples:
            replay = decode_replay(
                running.blobs.get(Blob(sample.sample_id, sample.replay)),
                sample_id=sample.sample_id,
                prompt_length=3,
                token_ids=np.asarray(sample.token_ids, np.int32),
            )
            assert replay.routing.shape == (6, 2, 2)
    assert running.trainer.depth() == 0
    assert (running.sampler.tally.groups, running.sampler.tally.samples, running.sampler.tally.tokens) == (5, 10, 40)
    assert running.sampler.tally.tokens_per_second() > 0


async def test_evaluation_is_sampled_without_recording(running):
    greedy = sample_pb2.SamplingParameters(temperature=0, top_p=1, max_tokens=4)
    running.trainer.add(make_prompt(purpose=sample_pb2.PURPOSE_EVALUATION, sampling=greedy))
    group = (await running.receive(1))["g1"]
    assert not any(sample.HasField("replay") for sample in group.samples)
    assert running.engine.calls[0][2] is False


async def test_no_more_groups_run_than_allowed(running):
    running.engine.gate.clear()
    for number in range(8):
        running.trainer.add(make_prompt(group_id=f"g{number}"))
    await running.until(lambda: running.engine.running == 3)
    await asyncio.sleep(0.6)
    assert running.engine.most_running == 3
    running.engine.gate.set()
    await running.receive(8)
    assert running.engine.most_running == 3


async def test_a_long_group_is_not_claimed_by_another(running, redis_client, redis_config):
    """Redis would give an entry away after 0.2 seconds; the heartbeat keeps it."""
    running.engine.gate.clear()
    running.trainer.add(make_prompt())
    await running.until(lambda: running.engine.running == 1)
    other = RunStreams(redis_client, running.config.run.name, redis_config).prompts("r2")
    until = time.monotonic() + 1
    while time.monotonic() < until:
        assert await asyncio.to_thread(other.read, 5, 0.05) == []
    running.engine.gate.set()
    await running.receive(1)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"token_ids": list(range(15))}, "prompt_too_long"),
        ({"token_ids": []}, "prompt_empty"),
        ({"token_ids": [1, 500]}, "token_out_of_range"),
    ],
)
async def test_a_bad_prompt_goes_to_the_dead_letters_and_the_next_is_sampled(running, changes, code):
    before = failures(code)
    running.trainer.add(make_prompt(group_id="bad", **changes))
    running.trainer.add(make_prompt(group_id="good"))
    assert list(await running.receive(1)) == ["good"]
    await running.until(lambda: running.trainer.depth() == 0)
    [letter] = running.dead.read()
    assert (letter.group_id, letter.code, letter.stream) == ("bad", code, "prompts")
    assert failures(code) == before + 1


async def test_what_the_engine_refuses_goes_to_the_dead_letters(running):
    running.engine.failures = [InvalidData("request_refused", "no")]
    running.trainer.add(make_prompt(group_id="bad"))
    await running.until(lambda: running.trainer.depth() == 0)
    assert [letter.code for letter in running.dead.read()] == ["request_refused"]


async def test_lost_samples_are_drawn_again(running):
    before = failures("engine_dead")
    running.engine.failures = [EngineFailed("engine_dead", "gone")]
    running.trainer.add(make_prompt())
    await running.receive(1)
    assert len(running.engine.calls) == 2
    assert failures("engine_dead") == before + 1
    assert running.dead.read() == []


async def test_a_prompt_that_always_loses_its_samples_is_given_up(running):
    running.engine.failures = [EngineFailed("engine_error", "again")] * 10
    running.trainer.add(make_prompt())
    await running.until(lambda: running.trainer.depth() == 0)
    [letter] = running.dead.read()
    assert letter.code == "too_many_deliveries"
    assert len(running.engine.calls) == 2  # redis.max_deliveries


async def test_nothing_is_read_while_the_engine_has_a_problem(running):
    running.engine.problem = "engine restarts"
    await asyncio.sleep(0.6)
    running.trainer.add(make_prompt())
    await asyncio.sleep(0.6)
    assert running.trainer.pending() == 0
    running.engine.problem = None
    await running.receive(1)


async def test_pause_takes_no_more_and_finishes_what_runs(running):
    running.engine.gate.clear()
    running.trainer.add(make_prompt(group_id="before"))
    await running.until(lambda: running.engine.running == 1)
    running.worker.pause()
    await asyncio.sleep(0.6)
    running.trainer.add(make_prompt(group_id="after"))
    running.engine.gate.set()
    assert list(await running.receive(1)) == ["before"]
    await asyncio.sleep(0.6)
    assert len(running.engine.calls) == 1
    running.worker.resume()
    assert sorted(await running.receive(2)) == ["after", "before"]


async def test_a_prompt_is_sampled_under_the_version_it_asks_for(running):
    follow = asyncio.create_task(running.follower.run())
    running.trainer.add(make_prompt(group_id="first"))
    await running.receive(1)
    running.feed.announce(weights_pb2.WeightVersion(version=1, fingerprint="new", path="/w/1"))
    running.trainer.add(make_prompt(group_id="second", min_version=1))
    groups = await running.receive(2)
    assert groups["first"].lineage.weights == "base"
    assert groups["second"].lineage.weights == "new"
    follow.cancel()


async def test_stop_finishes_what_it_can(system):
    task = asyncio.create_task(system.worker.run())
    system.engine.gate.clear()
    system.trainer.add(make_prompt())
    await system.until(lambda: system.engine.running == 1)
    asyncio.get_running_loop().call_later(0.2, system.engine.gate.set)
    await system.worker.drain(10)
    assert await system.worker.abandon() == 0
    await task
    await system.receive(1)
    assert system.trainer.depth() == 0


async def test_stop_leaves_the_rest_for_others(system, redis_client, redis_config):
    task = asyncio.create_task(system.worker.run())
    system.engine.gate.clear()
    system.trainer.add(make_prompt())
    await system.until(lambda: system.engine.running == 1)
    await system.worker.drain(0.1)
    assert await system.worker.abandon() == 1
    await task
    other = RunStreams(redis_client, system.config.run.name, redis_config).prompts("r2")
    entries = []
    deadline = time.monotonic() + 10
    while not entries and time.monotonic() < deadline:
        entries = await asyncio.to_thread(other.read, 5, 0.1)
    # Handed back: nobody waits until it is idle, and the delivery does not count.
    assert [(entry.message.group_id, entry.deliveries) for entry in entries] == [("g1", 1)]


async def test_an_unexpected_failure_ends_the_worker(system):
    system.engine.failures = [ZeroDivisionError("a bug")]
    system.trainer.add(make_prompt())
    with pytest.raises(ZeroDivisionError, match="a bug"):
        await asyncio.wait_for(system.worker.run(), 20)
    await system.worker.abandon()


async def test_a_full_blob_store_costs_no_prompt_and_no_sample(running, monkeypatch):
    """Longer than max_deliveries claims take, and than an entry may be idle."""
    put, full = running.blobs.put, asyncio.Event()
    full.set()

    def limited(sample_id, data):
        if full.is_set():
            raise Outage("blob_store", "no space left on device")
        return put(sample_id, data)

    monkeypatch.setattr(running.blobs, "put", limited)
    before = REGISTRY.get_sample_value("trivet_outages_total", {"code": "blob_store"}) or 0.0
    for number in range(3):
        running.trainer.add(make_prompt(group_id=f"g{number}"))
    await running.until(lambda: running.outages.problem == "waiting: no space left on device")
    await asyncio.sleep(1.5)
    full.clear()
    await running.receive(3)
    assert len(running.engine.calls) == 3
    assert running.dead.read() == []
    assert running.outages.problem is None
    assert REGISTRY.get_sample_value("trivet_outages_total", {"code": "blob_store"}) == before + 1


async def test_a_full_redis_costs_no_prompt_and_does_not_end_the_rollout(running, redis_client):
    running.engine.gate.clear()
    for number in range(3):
        running.trainer.add(make_prompt(group_id=f"g{number}"))
    await running.until(lambda: running.engine.running == 3)
    redis_client.config_set("maxmemory", 1)
    try:
        running.engine.gate.set()
        await running.until(lambda: running.outages.problem is not None)
        await asyncio.sleep(1.5)
    finally:
        redis_client.config_set("maxmemory", 0)
    await running.receive(3)
    assert len(running.engine.calls) == 3
    assert running.dead.read() == []
    assert not running.task.done()


async def test_an_engine_that_is_started_again_uses_up_no_delivery(running):
    running.engine.failures = [NotServed("engine_restarted", "engine restarts")] * 5
    running.trainer.add(make_prompt())
    await running.receive(1)
    assert len(running.engine.calls) == 6
    assert running.dead.read() == []


async def test_a_prompt_is_not_sampled_under_older_weights_than_it_asks_for(running):
    running.trainer.add(make_prompt(group_id="later", min_version=1))
    running.trainer.add(make_prompt(group_id="now"))
    assert list(await running.receive(1)) == ["now"]
    follow = asyncio.create_task(running.follower.run())
    running.feed.announce(weights_pb2.WeightVersion(version=1, fingerprint="new", path="/w/1"))
    groups = await running.receive(2)
    assert groups["later"].lineage.weights == "new"
    follow.cancel()


async def test_samples_of_an_engine_that_fell_back_meanwhile_are_drawn_again(running):
    base, new = running.engine.weights, weights_pb2.WeightVersion(version=1, fingerprint="new", path="/w/1")
    follow = asyncio.create_task(running.follower.run())
    running.feed.announce(new)
    await running.until(lambda: running.engine.weights.version == 1)
    running.engine.gate.clear()
    running.trainer.add(make_prompt(min_version=1))
    await running.until(lambda: running.engine.running == 1)
    # Started again under the first weights, and not yet brought forward.
    running.engine.problem, running.engine.weights = "engine restarts", base
    running.engine.gate.set()
    await running.until(lambda: running.engine.running == 0)
    await asyncio.sleep(0.1)
    assert running.received == []
    running.engine.problem = None
    groups = await running.receive(1)
    assert groups["g1"].lineage.weights == "new"
    assert len(running.engine.calls) == 2
    follow.cancel()


async def test_nothing_is_read_while_the_newest_weights_are_missing(running):
    running.engine.load_failures = [LoadFailed("weights_unreadable", "Input/output error")]
    running.feed.announce(weights_pb2.WeightVersion(version=1, fingerprint="new", path="/w/1"))
    await running.follower.catch_up()
    await asyncio.sleep(0.6)
    running.trainer.add(make_prompt())
    await asyncio.sleep(0.6)
    assert running.trainer.pending() == 0
    await asyncio.sleep(0.5)
    await running.follower.catch_up()
    await running.receive(1)
