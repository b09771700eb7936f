"""An engine without a model: what it samples follows from the prompt, and a test decides when and how it fails."""

import asyncio

import numpy as np
from trivet.v1 import sample_pb2, weights_pb2

from services.common.errors import Unavailable
from services.common.wire.replay_data import CandidateSets, Replay
from services.rollout.engine.protocol import EngineSample, LoadFailed, WeightSpan

VOCABULARY = 100


def make_prompt(**changes):
    fields = {
        "group_id": "g1",
        "purpose": sample_pb2.PURPOSE_TRAIN,
        "token_ids": [1, 2, 3],
        "group_size": 2,
        "sampling": sample_pb2.SamplingParameters(temperature=1.0, top_k=5, top_p=1.0, max_tokens=4),
        "lineage": sample_pb2.Lineage(data="d"),
    }
    return sample_pb2.Prompt(**{**fields, **changes})


def make_sample(prompt, index, *, weights, length=4, capture=True):
    token_ids = np.asarray([(prompt[0] + index + i) % VOCABULARY for i in range(length)], dtype=np.int32)
    replay = Replay(
        routing=np.tile(np.asarray([[0, 1], [2, 3]], dtype=np.uint8), (len(prompt) + length - 1, 1, 1)),
        candidates=CandidateSets(np.ones(length, dtype=np.int32), token_ids),
    )
    return EngineSample(
        token_ids=token_ids,
        logprobs=np.full(length, -0.5, dtype=np.float32),
        finish_reason="length",
        text=" ".join(map(str, token_ids)),
        spans=(WeightSpan(weights.version, weights.fingerprint, 0, length),),
        replay=replay if capture else None,
    )


class FakeEngine:
    max_length, vocabulary = 16, VOCABULARY
    devices = ("",)

    def __init__(self):
        self.weights = weights_pb2.WeightVersion(version=0, fingerprint="base")
        self.problem = None
        self.calls = []
        self.failures = []  # raised by the next calls of generate, one each
        self.load_failures = []
        self.loaded = []
        self.groups = []
        self.parts = []
        self.identity = "first"
        self.entered = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = self.most_running = 0
        self.refusal_reason = None
        self.closed = False

    async def launch(self): ...

    async def close(self):
        self.closed = True

    async def wait_gave_up(self):
        await asyncio.Event().wait()

    def refusal(self, sampling, capture):
        return self.refusal_reason

    async def generate(self, prompt_token_ids, sampling, sample_ids, *, capture):
        self.calls.append((list(prompt_token_ids), list(sample_ids), capture))
        self.running += 1
        self.entered.set()
        self.most_running = max(self.most_running, self.running)
        try:
            await self.gate.wait()
            if self.failures:
                raise self.failures.pop(0)
            return [
                make_sample(prompt_token_ids, i, weights=self.weights, capture=capture) for i in range(len(sample_ids))
            ]
        finally:
            self.running -= 1

    async def join_transfer(self, request):
        if self.load_failures:
            raise self.load_failures.pop(0)
        self.groups.append(request.group)

    async def receive_weights(self, delivery):
        """As the real engine: a sender that gives up before the first part leaves everything as it was."""
        try:
            part = await delivery.next()
        except Unavailable as error:
            raise LoadFailed(error.code, str(error)) from error
        while part is not None:
            self.parts.append((part.first, part.count))
            if self.load_failures:
                raise self.load_failures.pop(0)
            try:
                part = await delivery.next()
            except Unavailable as error:
                self.identity = "restarted"
                raise LoadFailed("weights_refused", str(error)) from error
        self.weights = delivery.begin.weights

    async def load_weights(self, weights):
        if self.load_failures:
            raise self.load_failures.pop(0)
        self.loaded.append(weights.version)
        self.weights = weights
