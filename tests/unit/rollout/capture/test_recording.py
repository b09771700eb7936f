import numpy as np
import pytest

from services.rollout.capture.recording import CaptureGap, Recording, Recordings


def rows(first, count, mark=0):
    """Row p of two layers names experts p and p + mark."""
    positions = np.arange(first, first + count, dtype=np.uint8)
    return np.stack([np.stack([positions, positions + mark], axis=1)] * 2, axis=1)


def ids(*values):
    return np.asarray(values, dtype=np.int32)


def routing(chunk):
    return np.frombuffer(chunk["routing"], dtype=chunk["routing_dtype"]).reshape(chunk["routing_shape"])


def test_rows_of_a_chunked_prompt_and_of_single_tokens_line_up():
    recording = Recording(prompt_length=5, positions=8, candidates=False)
    for start, count in ((0, 3), (3, 2), (5, 1), (6, 1)):
        recording.add_rows(start, rows(start, count))
    np.testing.assert_array_equal(routing(recording.chunk()), rows(0, 7))


def test_the_first_capture_counts_once_a_token_was_drawn():
    recording = Recording(prompt_length=3, positions=8, candidates=False)
    recording.add_rows(0, rows(0, 3, mark=10))
    recording.add_rows(3, rows(3, 1, mark=10))
    # An update in flight: all of it is forwarded again, and one token more.
    recording.add_rows(0, rows(0, 5, mark=20))
    expected = np.concatenate([rows(0, 4, mark=10), rows(4, 1, mark=20)])
    np.testing.assert_array_equal(routing(recording.chunk()), expected)


def test_the_last_capture_counts_before_a_token_was_drawn():
    recording = Recording(prompt_length=4, positions=6, candidates=False)
    recording.add_rows(0, rows(0, 2, mark=10))
    recording.add_rows(0, rows(0, 4, mark=20))
    np.testing.assert_array_equal(routing(recording.chunk()), rows(0, 4, mark=20))


def test_a_position_that_was_never_forwarded_is_not_papered_over():
    recording = Recording(prompt_length=2, positions=6, candidates=True)
    recording.add_rows(0, rows(0, 2))
    with pytest.raises(CaptureGap, match="positions 2 to 3"):
        recording.add_rows(4, rows(4, 1))
    with pytest.raises(CaptureGap, match="tokens 0 to 1"):
        recording.wants_candidates(3)


def test_rows_past_the_last_token_are_left_out():
    recording = Recording(prompt_length=2, positions=3, candidates=False)
    recording.add_rows(0, rows(0, 2))
    recording.add_rows(2, rows(2, 2))
    assert routing(recording.chunk()).shape == (3, 2, 2)


def test_candidates_belong_to_the_first_draw_of_each_token():
    recording = Recording(prompt_length=3, positions=6, candidates=True)
    # Part of a prompt: what it draws is discarded.
    assert not recording.wants_candidates(1)
    assert recording.wants_candidates(2)
    recording.add_candidates(ids(7, 8))
    # Forwarded again up to the same position, then on.
    assert not recording.wants_candidates(2)
    assert recording.wants_candidates(3)
    recording.add_candidates(ids(9))
    chunk = recording.chunk()
    assert np.frombuffer(chunk["candidate_counts"], np.int32).tolist() == [2, 1]
    assert np.frombuffer(chunk["candidate_ids"], np.int32).tolist() == [7, 8, 9]


def test_no_candidates_are_wanted_where_nothing_truncates():
    assert not Recording(prompt_length=3, positions=6, candidates=False).wants_candidates(2)


def test_taken_recordings_are_forgotten():
    recordings = Recordings(kept=2)
    recordings.start("a", Recording(1, 4, candidates=False))
    recordings.start("b", Recording(1, 4, candidates=False))
    recordings.finish("a")
    chunks = recordings.take(["a", "b", "c"])
    assert [chunk is None for chunk in chunks] == [False, False, True]
    assert len(recordings) == 0
    # The engine tells the end of a request only in its next step.
    recordings.finish("b")
    assert len(recordings) == 0


def test_memory_is_bounded_when_nobody_takes():
    recordings = Recordings(kept=2)
    for sample_id in "abcd":
        recordings.start(sample_id, Recording(1, 4, candidates=False))
        recordings.finish(sample_id)
    assert len(recordings) == 2
    assert recordings.evicted == 2
    assert [chunk is None for chunk in recordings.take(["a", "b", "c", "d"])] == [True, True, False, False]


def test_dropped_recordings_are_gone():
    recordings = Recordings(kept=2)
    recordings.start("a", Recording(1, 4, candidates=False))
    recordings.drop(["a", "unknown"])
    assert len(recordings) == 0
