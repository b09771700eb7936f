"""Whatever arrives as a group of samples, the reward service scores it or refuses it by name."""

from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st
from trivet.v1 import sample_pb2

from services.common.errors import InvalidData
from services.common.transport.dead_letters import FIELD, parse_entry
from services.common.wire.group import check_group
from services.reward.validate import check_texts

SOUND = sample_pb2.Group(
    prompt=sample_pb2.Prompt(group_id="h-1", text="sort 21", metadata_json='{"answer": "12"}', group_size=2),
    samples=[
        sample_pb2.Sample(sample_id=f"h-1/0/{index}", index=index, token_ids=[1, 2], logprobs=[-1.0, -0.5], text="12")
        for index in range(2)
    ],
).SerializeToString()


def scored_or_refused(data):
    with suppress(InvalidData):
        group = parse_entry({FIELD: data}, sample_pb2.Group)
        check_group(group)
        check_texts(group)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)), max_size=4), st.integers(0, len(SOUND)))
def test_a_damaged_group_is_scored_or_refused(changes, length):
    data = bytearray(SOUND)
    for position, value in changes:
        data[position] = value
    scored_or_refused(bytes(data[: length or None]))


@settings(max_examples=300, deadline=None)
@given(
    st.text(max_size=30) | st.just("[" * 100_000) | st.just('{"a": ' * 5_000) | st.just("1" * 10_000),
    st.lists(st.floats(width=32), max_size=3),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3),
    st.just(1) | st.integers(0, 2**32 - 1),
)
def test_any_fields_are_scored_or_refused(metadata, logprobs, token_ids, index):
    group = sample_pb2.Group.FromString(SOUND)
    group.prompt.metadata_json = metadata
    sample = sample_pb2.Sample(sample_id=f"h-1/0/{index}", index=index, token_ids=token_ids, logprobs=logprobs)
    group.samples[1].CopyFrom(sample)
    scored_or_refused(group.SerializeToString())
