import numpy as np
import pytest

from services.common.wire.replay_data import CandidateSets, Replay
from services.rollout.capture.captured import CapturedRequest
from services.rollout.capture.chunks import check_replay, open_chunk
from services.rollout.engine.protocol import EngineFailed


def made(dtype=np.uint8):
    captured = CapturedRequest(prompt_length=2, positions=4, candidates=True)
    captured.add_rows(0, np.arange(12, dtype=dtype).reshape(3, 2, 2))
    captured.add_candidates(np.asarray([4, 5], dtype=np.int32))
    captured.add_candidates(np.asarray([6], dtype=np.int32))
    return captured.chunk()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_chunk_opens_to_what_was_captured(dtype):
    replay = open_chunk(made(dtype), "s", candidates=True)
    np.testing.assert_array_equal(replay.routing, np.arange(12, dtype=dtype).reshape(3, 2, 2))
    assert replay.routing.dtype == dtype
    assert replay.candidates.counts.tolist() == [2, 1]
    assert replay.candidates.token_ids.tolist() == [4, 5, 6]
    check_replay(replay, "s", prompt_length=2, completion_length=2, moe=True)


def test_a_dense_model_and_no_truncation_leave_both_out():
    chunk = CapturedRequest(prompt_length=2, positions=4, candidates=False).chunk()
    replay = open_chunk(chunk, "s", candidates=False)
    assert replay.routing is None
    assert replay.candidates is None
    check_replay(replay, "s", prompt_length=2, completion_length=2, moe=False)


def test_a_lost_recording_may_be_drawn_again():
    with pytest.raises(EngineFailed) as failure:
        open_chunk(None, "s", candidates=True)
    assert failure.value.code == "capture_lost"


def sets(*counts):
    return CandidateSets(np.asarray(counts, np.int32), np.zeros(sum(counts), np.int32))


@pytest.mark.parametrize(
    ("rows", "candidates", "moe", "code"),
    [
        (2, sets(1, 1), True, "routing_rows"),
        (4, sets(1, 1), True, "routing_rows"),
        (0, sets(1, 1), True, "routing_rows"),
        (3, sets(1, 1), False, "routing_rows"),
        (3, sets(1), True, "candidates_rows"),
        (3, sets(1, 0), True, "candidates_rows"),
        (3, sets(1, 1, 1), True, "candidates_rows"),
    ],
)
def test_incomplete_replays_are_refused(rows, candidates, moe, code):
    replay = Replay(np.zeros((rows, 1, 1), np.uint8) if rows else None, candidates)
    with pytest.raises(EngineFailed) as failure:
        check_replay(replay, "s", prompt_length=2, completion_length=2, moe=moe)
    assert failure.value.code == code
