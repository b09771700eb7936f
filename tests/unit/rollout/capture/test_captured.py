import numpy as np
import pytest

from services.rollout.capture.captured import CapturedRequest, CapturedRequests, CaptureGap


def rows(first, count, mark=0):
    """Row p of two layers names experts p and p + mark."""
    positions = np.arange(first, first + count, dtype=np.uint8)
    return np.stack([np.stack([positions, positions + mark], axis=1)] * 2, axis=1)


def ids(*values):
    return np.asarray(values, dtype=np.int32)


def routing(chunk):
    return np.frombuffer(chunk["routing"], dtype=chunk["routing_dtype"]).reshape(chunk["routing_shape"])


def test_rows_of_a_chunked_prompt_and_of_single_tokens_line_up():
    captured = CapturedRequest(prompt_length=5, positions=8, candidates=False)
    for start, count in ((0, 3), (3, 2), (5, 1), (6, 1)):
        captured.add_rows(start, rows(start, count))
    np.testing.assert_array_equal(routing(captured.chunk()), rows(0, 7))


def test_the_first_capture_counts_once_a_token_was_drawn():
    captured = CapturedRequest(prompt_length=3, positions=8, candidates=False)
    captured.add_rows(0, rows(0, 3, mark=10))
    captured.add_rows(3, rows(3, 1, mark=10))
    # An update in flight: all of it is forwarded again, and one token more.
    captured.add_rows(0, rows(0, 5, mark=20))
    expected = np.concatenate([rows(0, 4, mark=10), rows(4, 1, mark=20)])
    np.testing.assert_array_equal(routing(captured.chunk()), expected)


def test_the_last_capture_counts_before_a_token_was_drawn():
    captured = CapturedRequest(prompt_length=4, positions=6, candidates=False)
    captured.add_rows(0, rows(0, 2, mark=10))
    captured.add_rows(0, rows(0, 4, mark=20))
    np.testing.assert_array_equal(routing(captured.chunk()), rows(0, 4, mark=20))


def test_a_position_that_was_never_forwarded_is_not_papered_over():
    captured = CapturedRequest(prompt_length=2, positions=6, candidates=True)
    captured.add_rows(0, rows(0, 2))
    with pytest.raises(CaptureGap, match="positions 2 to 3"):
        captured.add_rows(4, rows(4, 1))
    with pytest.raises(CaptureGap, match="tokens 0 to 1"):
        captured.wants_candidates(3)


def test_rows_past_the_last_token_are_left_out():
    captured = CapturedRequest(prompt_length=2, positions=3, candidates=False)
    captured.add_rows(0, rows(0, 2))
    captured.add_rows(2, rows(2, 2))
    assert routing(captured.chunk()).shape == (3, 2, 2)


def test_candidates_belong_to_the_first_draw_of_each_token():
    captured = CapturedRequest(prompt_length=3, positions=6, candidates=True)
    # Part of a prompt: what it draws is discarded.
    assert not captured.wants_candidates(1)
    assert captured.wants_candidates(2)
    captured.add_candidates(ids(7, 8))
    # Forwarded again up to the same position, then on.
    assert not captured.wants_candidates(2)
    assert captured.wants_candidates(3)
    captured.add_candidates(ids(9))
    chunk = captured.chunk()
    assert np.frombuffer(chunk["candidate_counts"], np.int32).tolist() == [2, 1]
    assert np.frombuffer(chunk["candidate_ids"], np.int32).tolist() == [7, 8, 9]


def test_no_candidates_are_wanted_where_nothing_truncates():
    assert not CapturedRequest(prompt_length=3, positions=6, candidates=False).wants_candidates(2)


def test_what_was_taken_is_forgotten():
    requests = CapturedRequests(kept=2)
    requests.start("a", CapturedRequest(1, 4, candidates=False))
    requests.start("b", CapturedRequest(1, 4, candidates=False))
    requests.finish("a")
    chunks = requests.take(["a", "b", "c"])
    assert [chunk is None for chunk in chunks] == [False, False, True]
    assert len(requests) == 0
    # The engine tells the end of a request only in its next step.
    requests.finish("b")
    assert len(requests) == 0


def test_memory_is_bounded_when_nobody_takes():
    requests = CapturedRequests(kept=2)
    for sample_id in "abcd":
        requests.start(sample_id, CapturedRequest(1, 4, candidates=False))
        requests.finish(sample_id)
    assert len(requests) == 2
    assert requests.evicted == 2
    assert [chunk is None for chunk in requests.take(["a", "b", "c", "d"])] == [True, True, False, False]


def test_what_was_dropped_is_forgotten():
    requests = CapturedRequests(kept=2)
    requests.start("a", CapturedRequest(1, 4, candidates=False))
    requests.drop(["a", "unknown"])
    assert len(requests) == 0
