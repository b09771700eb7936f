import dataclasses

import numpy as np
import pytest
from trivet.v1 import sample_pb2, tensor_pb2, weights_pb2

from services.common.errors import InvalidData
from services.common.wire.replay_data import decode_replay
from services.rollout.engine.protocol import WeightSpan
from services.rollout.groups.assemble import assemble, sample_ids, store_replays
from tests.support.rollout.fakes import make_prompt, make_sample

OLD = weights_pb2.WeightVersion(version=3, fingerprint="aa")


class MemoryBlobs:
    def __init__(self):
        self.data = {}

    def put(self, key, data):
        self.data[key] = data
        return tensor_pb2.BlobReference(key=key, size=len(data), checksum=1)


def put_together(prompt, samples):
    return assemble(prompt, samples, rollout_id="r", code="c", config="k", seconds=1.5)


def test_a_group_carries_every_sample_and_where_it_came_from():
    prompt = make_prompt(attempt=2)
    samples = [make_sample([1, 2, 3], i, weights=OLD) for i in range(2)]
    sampled = put_together(prompt, samples)
    group = sampled.group
    assert group.prompt == prompt
    assert (group.rollout_id, group.sampling_seconds) == ("r", 1.5)
    assert group.lineage == sample_pb2.Lineage(data="d", code="c", config="k", weights="aa")
    assert [sample.sample_id for sample in group.samples] == ["g1/2/0", "g1/2/1"] == sample_ids(prompt)
    for index, (sample, source) in enumerate(zip(group.samples, samples, strict=True)):
        assert sample.index == index
        assert list(sample.token_ids) == source.token_ids.tolist()
        assert list(sample.logprobs) == source.logprobs.tolist()
        assert sample.finish_reason == sample_pb2.FINISH_REASON_LENGTH
        assert list(sample.versions) == [sample_pb2.VersionSpan(version=3, start=0, end=4)]


def test_replays_are_stored_under_the_sample_and_read_back():
    prompt = make_prompt()
    sources = [make_sample([1, 2, 3], i, weights=OLD) for i in range(2)]
    blobs = MemoryBlobs()
    group = store_replays(put_together(prompt, sources), blobs)
    for sample, source in zip(group.samples, sources, strict=True):
        assert sample.replay.key == sample.sample_id
        replay = decode_replay(
            blobs.data[sample.sample_id],
            sample_id=sample.sample_id,
            prompt_length=3,
            token_ids=np.asarray(sample.token_ids, np.int32),
        )
        np.testing.assert_array_equal(replay.routing, source.replay.routing)
        np.testing.assert_array_equal(replay.candidates.token_ids, source.replay.candidates.token_ids)


def test_evaluation_stores_nothing():
    prompt = make_prompt(purpose=sample_pb2.PURPOSE_EVALUATION)
    samples = [make_sample([1, 2, 3], i, weights=OLD, capture=False) for i in range(2)]
    blobs = MemoryBlobs()
    group = store_replays(put_together(prompt, samples), blobs)
    assert blobs.data == {}
    assert not any(sample.HasField("replay") for sample in group.samples)


def test_a_group_that_spans_an_update_names_both_weights_in_order():
    sample = make_sample([1, 2, 3], 0, weights=OLD)
    mixed = dataclasses.replace(sample, spans=(WeightSpan(3, "aa", 0, 2), WeightSpan(4, "bb", 2, 4)))
    sampled = put_together(make_prompt(), [mixed, sample])
    assert sampled.group.lineage.weights == "aa+bb"
    assert [(span.version, span.start, span.end) for span in sampled.group.samples[0].versions] == [
        (3, 0, 2),
        (4, 2, 4),
    ]


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_logprob_that_is_no_number_is_refused(value):
    sample = make_sample([1, 2, 3], 1, weights=OLD)
    sample.logprobs[2] = value
    with pytest.raises(InvalidData, match=r"logprobs\[2\] of g1/0/1") as failure:
        put_together(make_prompt(), [make_sample([1, 2, 3], 0, weights=OLD), sample])
    assert failure.value.code == "logprob_not_finite"
