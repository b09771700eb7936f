import numpy as np
import pytest

from services.common.errors import InvalidData
from services.common.wire.replay_data import CandidateSets, Replay, check_model_bounds, decode_replay, encode_replay
from tests.support.shapes import unchecked

PROMPT_LENGTH, TOKENS = 3, np.array([5, 9, 2], np.int32)
ROUTING = np.stack([np.arange(5), np.arange(5) + 1], axis=1)[:, None, :].repeat(2, axis=1).astype(np.uint8)
CANDIDATES = CandidateSets(np.array([2, 1, 3], np.int32), np.array([5, 7, 9, 1, 2, 3], np.int32))


def decode(replay: Replay, **change):
    arguments = {"sample_id": "g/0/1", "prompt_length": PROMPT_LENGTH, "token_ids": TOKENS, **change}
    return decode_replay(encode_replay("g/0/1", replay), **arguments)


def test_round_trip():
    back = decode(Replay(ROUTING, CANDIDATES))
    np.testing.assert_array_equal(back.routing, ROUTING)
    np.testing.assert_array_equal(back.candidates.counts, CANDIDATES.counts)
    np.testing.assert_array_equal(back.candidates.token_ids, CANDIDATES.token_ids)


def test_absent_parts_stay_absent():
    assert decode(Replay()) == Replay(None, None)


def misshapen(routing) -> Replay:
    with unchecked():
        return Replay(routing)


def candidates(counts, token_ids) -> Replay:
    return Replay(None, CandidateSets(np.array(counts, np.int32), np.array(token_ids, np.int32)))


@pytest.mark.parametrize(
    ("replay", "code"),
    [
        (Replay(ROUTING[:-1]), "routing_rows"),
        (misshapen(ROUTING[:, 0]), "routing_shape"),
        (misshapen(ROUTING.astype(np.int32)), "routing_shape"),
        (Replay(np.zeros_like(ROUTING)), "routing_duplicate"),
        (candidates([2, 1], [5, 7, 9]), "candidates_rows"),
        (candidates([2, 1, 4], [5, 7, 9, 1, 2, 3]), "candidates_counts"),
        (candidates([2, 0, 4], [5, 7, 1, 2, 3, 4]), "candidates_counts"),
        (candidates([2, 1, 3], [5, 7, 9, 1, 8, 3]), "token_outside_candidates"),
        (candidates([2, 1, 3], [5, 5, 9, 1, 2, 3]), "candidate_duplicate"),
    ],
)
def test_a_replay_that_is_not_the_samples_is_refused(replay, code):
    with pytest.raises(InvalidData) as refusal:
        decode(replay)
    assert refusal.value.code == code


def test_another_samples_blob_is_refused():
    with pytest.raises(InvalidData, match="expected 'g/0/2'"):
        decode(Replay(ROUTING), sample_id="g/0/2")


def test_bytes_that_are_no_message_are_refused():
    with pytest.raises(InvalidData) as refusal:
        decode_replay(b"\xff\xff", sample_id="g", prompt_length=1, token_ids=TOKENS)
    assert refusal.value.code == "blob_corrupt"


@pytest.mark.parametrize(
    ("bounds", "code"),
    [
        ({"experts": 5}, "expert_out_of_range"),
        ({"moe_layers": 3}, "routing_shape"),
        ({"experts_per_token": 1}, "routing_shape"),
        ({"vocabulary": 9}, "candidate_out_of_range"),
    ],
)
def test_what_the_model_cannot_have_chosen_is_refused(bounds, code):
    fitting = {"moe_layers": 2, "experts_per_token": 2, "experts": 8, "vocabulary": 10}
    check_model_bounds(Replay(ROUTING, CANDIDATES), **fitting)
    with pytest.raises(InvalidData) as refusal:
        check_model_bounds(Replay(ROUTING, CANDIDATES), **{**fitting, **bounds})
    assert refusal.value.code == code
