"""A sample's replay data, checked against the sample before anything relies on it."""

import numpy as np

from services.common.wire.replay_data import CandidateSets, Replay
from services.rollout.capture.captured import Chunk
from services.rollout.engine.protocol import EngineFailed


def open_chunk(chunk: Chunk | None, sample_id: str, *, candidates: bool) -> Replay:
    """Raises EngineFailed when the worker no longer has the captured data."""
    if chunk is None:
        raise EngineFailed("capture_lost", f"the worker has no captured data of {sample_id}")
    shape = tuple(chunk["routing_shape"])
    routing = np.frombuffer(chunk["routing"], dtype=chunk["routing_dtype"]).reshape(shape)
    sets = CandidateSets(
        np.frombuffer(chunk["candidate_counts"], dtype=np.int32),
        np.frombuffer(chunk["candidate_ids"], dtype=np.int32),
    )
    return Replay(routing if shape[0] else None, sets if candidates else None)


def check_replay(replay: Replay, sample_id: str, *, prompt_length: int, completion_length: int, moe: bool) -> None:
    """Raises EngineFailed unless every position has its row and every token its candidates."""
    expected = prompt_length + completion_length - 1 if moe else 0
    rows = len(replay.routing) if replay.routing is not None else 0
    if rows != expected:
        raise EngineFailed("routing_rows", f"{sample_id} has {rows} routing rows, expected {expected}")
    if replay.candidates is None:
        return
    counts = replay.candidates.counts
    if len(counts) != completion_length or bool((counts < 1).any()):
        raise EngineFailed(
            "candidates_rows",
            f"{sample_id} has {int((counts > 0).sum())} candidate sets, expected {completion_length}",
        )
