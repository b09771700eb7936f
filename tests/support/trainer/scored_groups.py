"""A scored group of a mixture of experts with candidate sets, and its replay data."""

import numpy as np
from trivet.v1 import sample_pb2

from services.common.wire.replay_data import CandidateSets, Replay, encode_replay
from services.trainer.batch.model_facts import ModelFacts

FACTS = ModelFacts("qwen3_moe", vocabulary=96, moe_layers=2, experts=8, experts_per_token=2, packs=True)
PROMPT, COMPLETION, SIZE = [1, 2, 3], [4, 5, 6, 7], 2


def replay_of(sample_id):
    rows = len(PROMPT) + len(COMPLETION) - 1
    routing = np.tile(np.asarray([[0, 1], [2, 7]], np.uint8), (rows, 1, 1))
    ids = np.asarray([[token, 95] for token in COMPLETION], np.int32).reshape(-1)
    counts = np.full(len(COMPLETION), 2, np.int32)
    return encode_replay(sample_id, Replay(routing, CandidateSets(counts, ids)))


def scored_group():
    prompt = sample_pb2.Prompt(
        group_id="h-3",
        request=3,
        purpose=sample_pb2.PURPOSE_TRAIN,
        token_ids=PROMPT,
        group_size=SIZE,
        sampling=sample_pb2.SamplingParameters(temperature=1.0, top_k=2, top_p=1.0, max_tokens=4),
    )
    samples = [
        sample_pb2.Sample(
            sample_id=f"h-3/0/{index}",
            index=index,
            token_ids=COMPLETION,
            logprobs=[-0.5] * len(COMPLETION),
            finish_reason=sample_pb2.FINISH_REASON_LENGTH,
            text="4 5 6 7",
            versions=[sample_pb2.VersionSpan(version=1, start=0, end=len(COMPLETION))],
        )
        for index in range(SIZE)
    ]
    scores = [
        sample_pb2.Score(reward=index, raw_reward=index, components={"exact_match": index}) for index in range(SIZE)
    ]
    return sample_pb2.ScoredGroup(group=sample_pb2.Group(prompt=prompt, samples=samples), scores=scores)
