import asyncio
import json
import uuid
from contextlib import asynccontextmanager

import pytest
from prometheus_client import REGISTRY
from trivet.v1 import sample_pb2

from services.common.config import RedisConfig, RewardConfig
from services.common.transport.outages import Outages
from services.common.transport.streams import DeadLetters, RunStreams
from services.reward.consumer import RewardWorker
from services.reward.isolation.pool import ScorerPool
from services.reward.score import GroupScorer
from services.reward.stats import RewardStats

DEADLINE_SECONDS = 15.0


@pytest.fixture
def run(redis_client, redis_url):
    return Run(redis_client, RedisConfig(url=redis_url, claim_idle_seconds=0.5, retry_seconds=5))


class Run:
    """A run's streams as the other services see them."""

    def __init__(self, client, config):
        self.client, self.config, self.name = client, config, f"run-{uuid.uuid4().hex[:8]}"
        self.streams = RunStreams(client, self.name, config)
        self.samples = self.streams.samples("test")
        self.scored = self.streams.scored("test")
        self.dead_letters = DeadLetters(client, self.name)

    def submit(self, group_id, texts, metadata=None, **fields):
        self.samples.add(
            sample_pb2.Group(
                prompt=sample_pb2.Prompt(
                    group_id=group_id, text="sort 21", metadata_json=json.dumps(metadata or {"answer": "12"}), **fields
                ),
                samples=[
                    sample_pb2.Sample(sample_id=f"{group_id}/0/{i}", index=i, text=text) for i, text in enumerate(texts)
                ],
            )
        )

    async def until(self, condition):
        async with asyncio.timeout(DEADLINE_SECONDS):
            # Another client's writes give no event here.
            while not await asyncio.to_thread(condition):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    def scored_ids(self):
        return [message.group.prompt.group_id for message in self.scored.scan()]

    def dead(self):
        return {letter.group_id: letter for letter in self.dead_letters.read()}


@asynccontextmanager
async def working(
    run, *scorers, consumer="reward-1", concurrent_groups=8, heartbeat_seconds=0.1, drain_seconds=2.0, **options
):
    config = RewardConfig(
        scorers=[{"name": name} for name in scorers],
        concurrent_groups=concurrent_groups,
        **{"timeout_seconds": 30.0, "retries": 1, **options},
    )
    stats = RewardStats()
    pool = ScorerPool(config.scorers, workers=2, timeout_seconds=config.timeout_seconds)
    await pool.start()
    worker = RewardWorker(
        run.streams.samples(consumer),
        run.streams.scored(consumer),
        GroupScorer(config, pool, stats, consumer),
        concurrent_groups=concurrent_groups,
        heartbeat_seconds=heartbeat_seconds,
        outages=Outages(limit_seconds=30),
        drain_seconds=drain_seconds,
    )
    stop = asyncio.Event()
    running = asyncio.create_task(worker.run(stop))
    try:
        yield stats
    finally:
        stop.set()
        await asyncio.wait_for(running, 5)
        await pool.stop()


async def test_good_groups_arrive_scored_exactly_once_and_bad_ones_in_the_dead_letters(run):
    for number in range(20):
        run.submit(f"good-{number}", ["12", "21"])
    run.submit("bad", ["12", "21"], {"no": "answer"})
    run.submit("empty", [])
    async with working(run, "exact_match", concurrent_groups=4) as stats:
        await run.until(lambda: run.samples.depth() == 0)
        assert stats.groups == 20
    assert sorted(run.scored_ids()) == sorted(f"good-{number}" for number in range(20))
    for message in run.scored.scan():
        assert [score.reward for score in message.scores] == [1.0, 0.0]
    dead = run.dead()
    assert {group: letter.code for group, letter in dead.items()} == {"bad": "scorer_metadata", "empty": "group_size"}
    assert "exact_match on sample bad/0/0: metadata.answer is missing" in dead["bad"].reason
    assert sample_pb2.Group.FromString(dead["bad"].payload).prompt.group_id == "bad"
    assert (run.samples.depth(), run.samples.pending()) == (0, 0)


async def test_a_failing_scorer_ends_in_the_dead_letters_and_never_in_a_zero(run):
    run.submit("g", ["12", "21"])
    async with working(run, "tests.support.reward_test_scorers:raises"):
        await run.until(lambda: run.samples.depth() == 0)
    assert run.scored_ids() == []
    letter = run.dead()["g"]
    assert letter.code == "scorer_error"
    assert "KeyError" in letter.reason


async def test_what_a_scorer_makes_of_a_completion_costs_its_own_group_only(run):
    """A lone surrogate in a reason ended the service; so did a number that no float holds."""
    for number, completion in enumerate([r'{"answer": "\ud800"}', r'{"answer": "\u001b[2J"}', '{"answer": "plain"}']):
        run.submit(f"raises-{number}", [completion])
    async with working(run, "tests.support.reward_evil_scorers:raises_answer"):
        await run.until(lambda: run.samples.depth() == 0)
    outcomes = ["huge int", "huge fraction", "abort", "enormous", "unreadable error", "surrogate failure", "fine"]
    for name in outcomes:
        run.submit(name, [name])
    async with working(run, "tests.support.reward_evil_scorers:outcome"):
        await run.until(lambda: run.samples.depth() == 0)
    assert run.scored_ids() == ["fine"]
    dead = run.dead()
    assert set(dead) == {"raises-0", "raises-1", "raises-2", *outcomes[:-1]}
    assert "sample raises-0/0/0: ValueError: \ufffd (" in dead["raises-0"].reason
    assert "ValueError: \ufffd[2J (" in dead["raises-1"].reason
    assert (dead["huge int"].code, dead["abort"].code) == ("reward_not_finite", "scorer_crash")
    assert len(dead["enormous"].reason) < 4_000


async def test_a_hanging_sample_costs_its_own_group_only(run):
    run.submit("hangs", ["fine", "hang"])
    for number in range(5):
        run.submit(f"fine-{number}", ["fine", "fine"])
    async with working(run, "tests.support.reward_test_scorers:endless_when_asked", timeout_seconds=0.3, retries=0):
        await run.until(lambda: run.samples.depth() == 0)
    assert sorted(run.scored_ids()) == [f"fine-{number}" for number in range(5)]
    assert run.dead()["hangs"].code == "scorer_timeout"


async def test_a_group_in_work_is_not_claimed_by_another(run):
    run.submit("slow", ["x"], {"seconds": 1.5})
    async with working(run, "tests.support.reward_test_scorers:sleepy"):
        await run.until(lambda: run.samples.pending() == 1)
        other = run.streams.samples("other")
        while not run.scored_ids():
            assert await asyncio.to_thread(other.read, 1, 0.1) == []
    assert run.scored_ids() == ["slow"]


async def test_a_saturated_worker_outlives_a_flushed_redis(run):
    run.submit("slow", ["x"], {"seconds": 0.6})
    async with working(run, "tests.support.reward_test_scorers:sleepy", concurrent_groups=1, heartbeat_seconds=0.05):
        await run.until(lambda: run.samples.pending() == 1)
        run.client.flushall()
        await run.until(lambda: run.scored_ids() == ["slow"])
        run.submit("after", ["x"], {"seconds": 0})
        await run.until(lambda: run.scored_ids() == ["slow", "after"])


async def test_what_a_stopped_worker_had_not_finished_is_finished_by_another(run):
    run.submit("slow", ["x"], {"seconds": 0.6})
    async with working(run, "tests.support.reward_test_scorers:sleepy", consumer="reward-1", drain_seconds=0.1):
        await run.until(lambda: run.samples.pending() == 1)
    assert run.scored_ids() == []
    assert run.samples.pending() == 1
    async with working(run, "tests.support.reward_test_scorers:sleepy", consumer="reward-2"):
        await run.until(lambda: run.samples.depth() == 0)
    (scored,) = run.scored.scan()
    assert scored.reward_id == "reward-2"


async def test_no_more_groups_than_allowed_are_taken(run):
    for number in range(6):
        run.submit(f"g{number}", ["x"], {"seconds": 0.2})
    async with working(run, "tests.support.reward_test_scorers:sleepy", concurrent_groups=2) as stats:
        most = 0
        while len(run.scored_ids()) < 6:
            most = max(most, stats.running)
            assert await asyncio.to_thread(run.samples.pending) <= 2
        assert most == 2


async def test_a_full_redis_costs_no_group_and_does_not_end_the_service(run):
    """For longer than an entry may be idle."""

    def outages():
        return REGISTRY.get_sample_value("trivet_outages_total", {"code": "redis_memory"}) or 0.0

    before = outages()
    async with working(run, "exact_match"):
        run.submit("g", ["12", "21"])
        run.submit("bad", ["12"], {"no": "answer"})
        run.client.config_set("maxmemory", 1)
        try:
            await run.until(
                lambda: REGISTRY.get_sample_value("trivet_outages_total", {"code": "redis_memory"}) != before
            )
            await asyncio.sleep(1.5)
        finally:
            run.client.config_set("maxmemory", 0)
        await run.until(lambda: run.samples.depth() == 0)
    assert run.scored_ids() == ["g"]
    assert {group: letter.code for group, letter in run.dead().items()} == {"bad": "scorer_metadata"}
