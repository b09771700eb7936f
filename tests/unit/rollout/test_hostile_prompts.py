"""Whatever arrives as a prompt, a rollout samples it or refuses it by name."""

from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st
from trivet.v1 import sample_pb2

from services.common.errors import InvalidData
from services.common.transport.dead_letters import FIELD, parse_entry
from services.common.wire.group import sample_id
from services.rollout.groups.admission import check_prompt
from tests.support.rollout.fakes import FakeEngine, make_prompt

SOUND = make_prompt(text="1 2 3", metadata_json="{}", prompt_id="7").SerializeToString()
UINT32, UINT64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
FLOATS = st.floats(width=32)


def accepted_or_refused(data):
    with suppress(InvalidData):
        prompt = parse_entry({FIELD: data}, sample_pb2.Prompt)
        check_prompt(prompt, FakeEngine())
        assert len(sample_id(prompt, prompt.group_size)) < 200
        assert prompt.sampling.seed + prompt.group_size < 2**63


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)), max_size=4), st.integers(0, len(SOUND)))
def test_a_damaged_prompt_is_sampled_or_refused(changes, length):
    data = bytearray(SOUND)
    for position, value in changes:
        data[position] = value
    accepted_or_refused(bytes(data[: length or None]))


@settings(max_examples=400, deadline=None)
@given(
    st.builds(
        sample_pb2.Prompt,
        group_id=st.text(max_size=300),
        request=UINT64,
        purpose=st.integers(0, 9),
        token_ids=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20),
        group_size=UINT32,
        min_version=UINT64,
        attempt=UINT32,
        sampling=st.builds(
            sample_pb2.SamplingParameters,
            temperature=FLOATS,
            top_k=UINT32,
            top_p=FLOATS,
            max_tokens=UINT32,
            seed=UINT64,
        ),
    )
)
def test_any_fields_are_sampled_or_refused(prompt):
    accepted_or_refused(prompt.SerializeToString())
