"""Rank 0 against a real Redis, with the rest of the system played."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import redis
from trivet.v1 import sample_pb2, step_pb2

from services.common.transport.blobs import open_blobs
from services.common.transport.streams import RunStreams
from services.common.wire.group import sample_id
from services.common.wire.replay_data import Replay, encode_replay
from services.trainer.batch.model_facts import ModelFacts
from services.trainer.checkpoint.directory import TrainerState
from services.trainer.data.prompts import PromptData, PromptRow, PromptSet
from services.trainer.steps.orchestrator import Orchestrator
from services.trainer.steps.status import Controls, Status

GROUPS, SIZE = 2, 2
# Dense, so that there is nothing to replay.
FACTS = ModelFacts("qwen3", vocabulary=16, moe_layers=0, experts=0, experts_per_token=0, packs=True)


class Play:
    """The rest of the system."""

    def __init__(self, config, client):
        self.streams = RunStreams(client, config.run.name, config.redis)
        self.prompts, self.samples = self.streams.prompts("rollout"), self.streams.samples("reward")
        self.scored = self.streams.scored("unused")
        self.blobs = open_blobs(config.blobs, client, config.run.name)

    def read(self):
        return self.prompts.read(100, 0.2)

    def group(self, prompt: sample_pb2.Prompt) -> sample_pb2.ScoredGroup:
        sample_ids = [sample_id(prompt, index) for index in range(prompt.group_size)]
        samples = [
            sample_pb2.Sample(
                sample_id=own_id,
                index=index,
                token_ids=[1, 2],
                logprobs=[-1.0, -2.0],
                finish_reason=sample_pb2.FINISH_REASON_STOP,
                versions=[sample_pb2.VersionSpan(version=prompt.min_version, start=0, end=2)],
                replay=self.blobs.put(own_id, encode_replay(own_id, Replay())),
            )
            for index, own_id in enumerate(sample_ids)
        ]
        scores = [sample_pb2.Score(reward=index % 2, raw_reward=index % 2) for index in range(prompt.group_size)]
        return sample_pb2.ScoredGroup(group=sample_pb2.Group(prompt=prompt, samples=samples), scores=scores)

    def answer(self, change=lambda scored: None, entries=None) -> list[int]:
        """Requests of the entries, of those that can be read where none are given."""
        answered = []
        for entry in self.read() if entries is None else entries:
            scored = self.group(entry.message)
            change(scored)
            self.prompts.forward(entry.id, self.scored, scored)
            answered.append(entry.message.request)
        return answered


def orchestrator(config, client, filtered_rounds=0, deaths=None) -> Orchestrator:
    rows = [PromptRow(str(index), f"prompt {index}", [index], "{}") for index in range(8)]
    data = PromptData(PromptSet(rows, 0, True), PromptSet(rows[:2], 0, False), "data", 0)
    return Orchestrator(config, data, client, Status("run", 10), Controls(), FACTS, filtered_rounds, deaths)


def until_training(made: Orchestrator) -> step_pb2.StepOrder:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        order = made.next_order().message
        if order.action != step_pb2.STEP_ACTION_WAIT:
            return order
    raise AssertionError("nothing to train on")


def evaluated(made: Orchestrator, meanwhile: Callable[[], object]) -> dict[str, float] | None:
    """What an evaluation returns or raises, while `meanwhile` plays the rest of the system over and over."""
    deadline = time.monotonic() + 15
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(made.evaluate)
        while not waiting.done() and time.monotonic() < deadline:
            meanwhile()
        return waiting.result(1)


def nan_logprob(scored: sample_pb2.ScoredGroup) -> None:
    scored.group.samples[0].logprobs[0] = float("nan")


def dead_letters(client: redis.Redis) -> list[sample_pb2.DeadLetter]:
    return [sample_pb2.DeadLetter.FromString(fields[b"message"]) for _, fields in client.xrange("run:dead")]


def trained(order: step_pb2.StepOrder) -> list[int]:
    return [scored.group.prompt.request for scored in order.groups]


def state(made: Orchestrator, step: int = 0) -> TrainerState:
    return TrainerState(step, made.history, "m", "d", "c", 1, made.dump(), 0.0)
