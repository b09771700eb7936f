"""Whatever is slow, dies or goes back: no sample that is trained on is older than max_staleness, and the run ends."""

import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from trivet.v1 import sample_pb2, step_pb2, weights_pb2

from services.common.config import parse_config
from services.common.transport.blobs import open_blobs
from services.common.transport.streams import RunStreams
from services.common.transport.weight_feed import WeightFeed
from services.common.wire.group import sample_id
from services.common.wire.replay_data import Replay, encode_replay
from services.rollout.weights.follower import WeightFollower
from services.trainer.checkpoint.directory import TrainerState
from services.trainer.data.prompts import PromptData, PromptRow, PromptSet
from services.trainer.steps import orchestrator as module
from services.trainer.steps.orchestrator import Orchestrator
from services.trainer.steps.status import Controls, Status
from tests.support.trainer.orchestration import FACTS

STEPS, HELD = 6, 3
BASE = weights_pb2.WeightVersion(version=0, fingerprint="base")


class Rollout:
    """Takes prompts in order, a few at a time, and finishes them in any order and when it likes."""

    def __init__(self, world, name):
        self.world, self.name = world, name
        self.start()

    def start(self):
        self.engine = SimpleNamespace(weights=BASE, identity="", problem=None)
        self.follower = WeightFollower(
            self.engine, WeightFeed(self.world.client, "run"), timeout_seconds=1, directory=Path("/w")
        )
        self.prompts = self.world.streams.prompts(self.name)
        self.held = []

    def take(self):
        # What somebody has handed back is claimed at every look.
        self.prompts._next_claim = float("-inf")
        self.held += self.prompts.read(1, 0.001) if len(self.held) < HELD else []

    def load(self):
        newest = self.follower._feed.latest()
        if newest is not None:
            self.follower._newest, self.engine.weights = newest, newest[1]

    def finish(self):
        version = self.engine.weights.version
        ready = [e for e in self.held if self.follower.serves(version, e.message.min_version, e.id)]
        if ready:
            entry = self.world.chance.choice(ready)
            self.held.remove(entry)
            self.world.sampled.append((self, entry, version))

    def die(self):
        mine = [entry for rollout, entry, _ in self.world.sampled if rollout is self]
        self.world.sampled = [each for each in self.world.sampled if each[0] is not self]
        self.prompts.release([*self.held, *mine])
        self.start()


class World:
    """The trainer over a real Redis, two rollouts, and what happens to them in an order that chance decides."""

    def __init__(self, client, redis_config, groups, staleness, seed):
        self.chance = random.Random(seed)
        self.client, self.groups, self.staleness = client, groups, staleness
        # Nobody is idle for so long: entries are handed back, not claimed.
        redis_config = redis_config.model_copy(update={"claim_idle_seconds": 3600.0})
        self.config = parse_config(
            {
                "run": {"name": "run"},
                "redis": redis_config.model_dump(),
                "model": {"path": "model"},
                "data": {"train": {"kind": "jsonl", "path": "train.jsonl"}},
                "sampling": {"group_size": 2},
                "reward": {"scorers": [{"name": "exact_match"}]},
                "trainer": {"groups_per_step": groups, "max_staleness": staleness, "steps": STEPS},
            }
        )
        self.streams = RunStreams(client, "run", redis_config)
        self.blobs = open_blobs(self.config.blobs, client, "run")
        self.sampled, self.trained, self.publications, self.attempts = [], {}, 0, set()
        self.trainer = self.start()
        self.saved = self.state()
        self.publish()
        self.rollouts = [Rollout(self, "one"), Rollout(self, "other")]

    def start(self):
        rows = [PromptRow(str(index), f"prompt {index}", [index], "{}") for index in range(16)]
        data = PromptData(PromptSet(rows, 0, True), PromptSet(rows[:1], 0, False), "data", 0)
        return Orchestrator(self.config, data, self.client, Status("run", STEPS), Controls(), FACTS)

    def state(self):
        return TrainerState(self.trainer.step, self.trainer.history, "m", "d", "c", 1, self.trainer.dump(), 0.0)

    def publish(self):
        self.publications += 1
        self.trainer.feed.announce(
            weights_pb2.WeightVersion(version=self.trainer.step, fingerprint=f"f{self.publications}", path="/w/v")
        )
        self.trainer.issue()

    def score(self):
        """Rewards come for any of those that were sampled."""
        if not self.sampled:
            return
        rollout, entry, version = self.sampled.pop(self.chance.randrange(len(self.sampled)))
        prompt = entry.message
        self.attempts.add(prompt.attempt)
        samples = [
            sample_pb2.Sample(
                sample_id=sample_id(prompt, index),
                index=index,
                token_ids=[1],
                logprobs=[-1.0],
                finish_reason=sample_pb2.FINISH_REASON_LENGTH,
                versions=[sample_pb2.VersionSpan(version=version, start=0, end=1)],
                replay=self.blobs.put(sample_id(prompt, index), encode_replay(sample_id(prompt, index), Replay())),
            )
            for index in range(2)
        ]
        group = sample_pb2.Group(prompt=prompt, samples=samples)
        scored = sample_pb2.ScoredGroup(group=group, scores=[sample_pb2.Score(), sample_pb2.Score()])
        rollout.prompts.forward(entry.id, self.streams.scored("unused"), scored)

    def train(self):
        order = self.trainer.next_order().message
        if order.action != step_pb2.STEP_ACTION_TRAIN:
            return
        step = self.trainer.step
        for scored in order.groups:
            oldest = min(span.version for sample in scored.group.samples for span in sample.versions)
            assert step - oldest <= self.staleness, f"a sample of version {oldest} at step {step}"
        self.trained[step] = [scored.group.prompt.request for scored in order.groups]
        self.trainer.step += 1
        self.publish()
        if self.chance.random() < 0.4:
            self.saved = self.state()
            self.trainer.commit()

    def kill_trainer(self):
        # No start takes less than the milliseconds that tell entries of one stream from those of another.
        time.sleep(0.002)
        self.trainer = self.start()
        self.trainer.restore(self.saved)
        self.trained = {step: requests for step, requests in self.trained.items() if step < self.trainer.step}
        self.publish()

    def go_on(self, *, disasters):
        # One of them is slow.
        [rollout] = self.chance.choices(self.rollouts, [10, 1])
        events = {rollout.take: 3, rollout.load: 2, rollout.finish: 3, self.score: 3, self.train: 3}
        if disasters:
            events |= {rollout.die: 0.3, self.kill_trainer: 0.2, self.client.flushdb: 0.05}
        self.chance.choices(list(events), list(events.values()))[0]()


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(module, "POLL_SECONDS", 0.001)
    # What Redis lost is soon missed.
    monkeypatch.setattr(module, "RECONCILE_SECONDS", 0.02)


def until_the_end(world, disasters):
    """While fewer than so many events have been, disasters are among them."""
    events = 0
    while world.trainer.step < STEPS:
        world.go_on(disasters=events < disasters)
        events += 1
        assert events < 20_000, "the run does not continue"
    trained = [request for step in sorted(world.trained) for request in world.trained[step]]
    assert len(trained) == STEPS * world.groups
    assert len(set(trained)) == len(trained)


BOUNDS = pytest.mark.parametrize(("groups", "staleness"), [(2, 0), (1, 1), (3, 1), (2, 2)])


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("impatient")
@BOUNDS
def test_no_sample_is_too_old_and_the_run_ends(redis_client, redis_config, groups, staleness):
    until_the_end(World(redis_client, redis_config, groups, staleness, seed=7), disasters=150)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("impatient")
@BOUNDS
def test_where_nothing_dies_no_group_is_sampled_twice_however_slow(redis_client, redis_config, groups, staleness):
    """One that is overtaken would be too old for its step, and the slowest would never be trained on."""
    world = World(redis_client, redis_config, groups, staleness, seed=3)
    until_the_end(world, disasters=0)
    assert world.attempts == {0}
