"""Whatever arrives as a scored group, the trainer takes it or refuses it by name."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trivet.v1 import rollout_pb2, sample_pb2, tensor_pb2, weights_pb2

from services.common.errors import InvalidData, entrys_fault
from services.common.transport.dead_letters import FIELD, parse_entry
from services.trainer.batch.groups import check_scored_group, decode_group
from services.trainer.steps.evaluation import Evaluation
from tests.support.trainer.scored_groups import COMPLETION, FACTS, SIZE, replay_of, scored_group

SCORED = scored_group().SerializeToString()
REPLAY = replay_of("h-3/0/0")


def take(scored_bytes, replay_bytes):
    """As the intake does, without its guard: what is raised must be InvalidData."""
    scored = parse_entry({FIELD: scored_bytes}, sample_pb2.ScoredGroup)
    check_scored_group(scored)
    evaluation = Evaluation("e", 1.0, {scored.group.prompt.group_id: scored.group.prompt}, lambda _: None)
    evaluation.add(scored)
    size = len(scored.group.samples)
    replays = [replay_bytes, replay_of("h-3/0/1"), *[replay_bytes] * size][:size]
    return decode_group(scored, replays, FACTS)


def accepted_or_refused(scored_bytes, replay_bytes):
    with suppress(InvalidData):
        take(scored_bytes, replay_bytes)


@st.composite
def damaged(draw, sound):
    data = bytearray(sound)
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["flip", "cut", "insert", "swap", "repeat"]))
        start, end = sorted(draw(st.tuples(*[st.integers(0, max(0, len(data) - 1))] * 2)))
        if kind == "flip" and data:
            data[start] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del data[start:end]
        elif kind == "insert":
            data[start:start] = draw(st.binary(max_size=12))
        elif kind == "swap":
            data[start:end] = data[start:end][::-1]
        else:
            data[start:start] = data[start:end]
    return bytes(data)


def test_the_sound_group_is_taken():
    assert len(take(SCORED, REPLAY)) == SIZE


@settings(max_examples=400, deadline=None)
@given(damaged(SCORED))
def test_a_damaged_group_is_taken_or_refused(scored_bytes):
    accepted_or_refused(scored_bytes, REPLAY)


@settings(max_examples=400, deadline=None)
@given(damaged(REPLAY))
def test_a_damaged_replay_is_taken_or_refused(replay_bytes):
    accepted_or_refused(SCORED, replay_bytes)


TENSORS = st.builds(
    tensor_pb2.Tensor,
    dtype=st.sampled_from(["uint8", "uint16", "int32", "int64", "float32", "object", ""]),
    shape=st.lists(st.one_of(st.integers(0, 8), st.integers(0, 2**32 - 1)), max_size=80),
    codec=st.integers(0, 3),
    data=st.binary(max_size=64),
)


@settings(max_examples=400, deadline=None)
@given(TENSORS, TENSORS, TENSORS)
def test_any_tensors_are_taken_or_refused(routing, counts, ids):
    message = tensor_pb2.ReplayData(sample_id="h-3/0/0", routing=routing, candidate_counts=counts, candidate_ids=ids)
    accepted_or_refused(SCORED, message.SerializeToString())


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(
        [
            sample_pb2.Prompt,
            sample_pb2.Group,
            sample_pb2.ScoredGroup,
            sample_pb2.DeadLetter,
            weights_pb2.WeightVersion,
            rollout_pb2.RegisteredRollout,
        ]
    ),
    damaged(SCORED),
)
def test_any_message_is_parsed_or_refused(message_type, data):
    with suppress(InvalidData):
        parse_entry({FIELD: data}, message_type)


def test_a_bomb_is_refused_before_it_goes_off():
    """A few hundred bytes that say they are 2 GB of candidates."""
    counts = np.full(len(COMPLETION), 2**27, np.int32)
    message = tensor_pb2.ReplayData.FromString(REPLAY)
    message.candidate_counts.data = counts.tobytes()
    message.candidate_ids.shape[:] = [int(counts.sum(dtype=np.int64)) - 1]
    with pytest.raises(InvalidData, match=r"candidate_ids.shape .* more than the 2688 bytes allowed"):
        take(SCORED, message.SerializeToString())


def test_what_code_that_looks_at_an_entry_raises_is_the_entrys_fault():
    with pytest.raises(InvalidData, match="OverflowError: int too large"), entrys_fault():
        raise OverflowError("int too large")
    with pytest.raises(MemoryError), entrys_fault():
        raise MemoryError
