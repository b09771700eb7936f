"""What becomes of a group of the stream: scored, or a dead letter that says why not."""

import asyncio
import json
import uuid
from contextlib import asynccontextmanager

import pytest
from trivet.v1 import sample_pb2

from services.common.config import RedisConfig, RewardConfig
from services.common.transport.consumer import Consumer
from services.common.transport.outages import Outages
from services.common.transport.streams import DeadLetters, RunStreams
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
async def working(run, *scorers, concurrent_groups=8, **options):
    config = RewardConfig(
        scorers=[{"name": name} for name in scorers],
        concurrent_groups=concurrent_groups,
        **{"timeout_seconds": 30.0, "retries": 1, **options},
    )
    stats = RewardStats()
    pool = ScorerPool(config.scorers, workers=2, timeout_seconds=config.timeout_seconds)
    await pool.start()
    loop = Consumer(
        run.streams.samples("reward-1"),
        run.streams.scored("reward-1"),
        GroupScorer(config, pool, stats, "reward-1").handle,
        concurrency=concurrent_groups,
        outages=Outages(limit_seconds=30),
        grace_seconds=2.0,
    )
    stop = asyncio.Event()
    running = asyncio.create_task(loop.run(stop))
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
    async with working(run, "tests.support.reward.scorers:raises"):
        await run.until(lambda: run.samples.depth() == 0)
    assert run.scored_ids() == []
    letter = run.dead()["g"]
    assert letter.code == "scorer_error"
    assert "KeyError" in letter.reason


async def test_what_a_scorer_makes_of_a_completion_costs_its_own_group_only(run):
    """A lone surrogate in a reason ended the service; so did a number that no float holds."""
    for number, completion in enumerate([r'{"answer": "\ud800"}', r'{"answer": "\u001b[2J"}', '{"answer": "plain"}']):
        run.submit(f"raises-{number}", [completion])
    async with working(run, "tests.support.reward.evil_scorers:raises_answer"):
        await run.until(lambda: run.samples.depth() == 0)
    outcomes = ["huge int", "huge fraction", "abort", "enormous", "unreadable error", "surrogate failure", "fine"]
    for name in outcomes:
        run.submit(name, [name])
    async with working(run, "tests.support.reward.evil_scorers:outcome"):
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
    async with working(run, "tests.support.reward.scorers:endless_when_asked", timeout_seconds=0.3, retries=0):
        await run.until(lambda: run.samples.depth() == 0)
    assert sorted(run.scored_ids()) == [f"fine-{number}" for number in range(5)]
    assert run.dead()["hangs"].code == "scorer_timeout"
