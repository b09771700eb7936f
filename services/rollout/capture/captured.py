"""What a worker remembers of each request until its sample is fetched: routing rows and candidate sets.

An in-flight weight update makes the engine forward a running request's tokens a second time, under the new weights.
Once a token was drawn, the first capture of a position counts: it belongs to the forward pass that drew the token after
that position, and so to its log-probability. The rows of the second pass are the context of later tokens only, and one
row a position cannot be both. Before the first token is drawn, the last capture of a prompt position counts: no
log-probability came of the passes before. vLLM's native capture emits rows when a token is drawn, each position once,
and so decides the same way.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np
from jaxtyping import Int32, UInt

from services.common.wire.tensors import Array


class CaptureGap(RuntimeError):
    """A position was forwarded that does not follow the earlier ones: the captured rows would have a gap."""


class Chunk(TypedDict):
    """A finished capture as bytes: no arrays can be sent from the worker."""

    routing: bytes
    routing_shape: list[int]
    routing_dtype: str
    candidate_counts: bytes
    candidate_ids: bytes


@dataclass
class CapturedRequest:
    """One request: P prompt tokens, room for P + max_tokens − 1 forwarded positions."""

    prompt_length: int
    positions: int
    candidates: bool
    rows: UInt[Array, "positions layers experts_per_token"] | None = None
    filled: int = 0
    candidate_counts: list[int] = field(default_factory=list)
    candidate_ids: list[Int32[Array, "candidates"]] = field(default_factory=list)

    def add_rows(self, start: int, rows: UInt[Array, "positions layers experts_per_token"]) -> None:
        """Rows of the positions from `start` on. Raises CaptureGap."""
        if start > self.filled:
            raise CaptureGap(f"positions {self.filled} to {start - 1} were never captured")
        if self.filled < self.prompt_length:
            self.filled = start
        end = min(start + len(rows), self.positions)
        if end <= self.filled:
            return
        if self.rows is None:
            self.rows = np.empty((self.positions, *rows.shape[1:]), dtype=rows.dtype)
        self.rows[self.filled : end] = rows[self.filled - start : end - start]
        self.filled = end

    def wants_candidates(self, position: int) -> bool:
        """Whether the token drawn after `position` is one whose candidates are not known yet. Raises CaptureGap."""
        index = position - self.prompt_length + 1
        if not self.candidates or index < len(self.candidate_counts):
            # Also a part of a prompt (index < 0): what it draws is discarded.
            return False
        if index > len(self.candidate_counts):
            raise CaptureGap(f"candidates of tokens {len(self.candidate_counts)} to {index - 1} were never captured")
        return True

    def add_candidates(self, token_ids: Int32[Array, "candidates"]) -> None:
        self.candidate_counts.append(len(token_ids))
        self.candidate_ids.append(token_ids)

    def chunk(self) -> Chunk:
        rows = self.rows[: self.filled] if self.rows is not None else np.empty((0, 0, 0), dtype=np.uint8)
        ids = np.concatenate(self.candidate_ids) if self.candidate_ids else np.empty(0, dtype=np.int32)
        return Chunk(
            routing=rows.tobytes(),
            routing_shape=list(rows.shape),
            routing_dtype=rows.dtype.name,
            candidate_counts=np.asarray(self.candidate_counts, dtype=np.int32).tobytes(),
            candidate_ids=ids.tobytes(),
        )


class CapturedRequests:
    """By sample id. Finished ones wait to be taken, at most `kept`: the oldest then goes."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._running: dict[str, CapturedRequest] = {}
        self._finished: OrderedDict[str, CapturedRequest] = OrderedDict()
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._running) + len(self._finished)

    def start(self, sample_id: str, captured: CapturedRequest) -> None:
        self._finished.pop(sample_id, None)
        self._running[sample_id] = captured

    def running(self, sample_id: str) -> CapturedRequest | None:
        return self._running.get(sample_id)

    def finish(self, sample_id: str) -> None:
        captured = self._running.pop(sample_id, None)
        if captured is None:
            return
        self._finished[sample_id] = captured
        if len(self._finished) > self._kept:
            self._finished.popitem(last=False)
            self.evicted += 1

    def take(self, sample_ids: Sequence[str]) -> list[Chunk | None]:
        """Hands each over and forgets it; None for one that is not here."""
        chunks: list[Chunk | None] = []
        for sample_id in sample_ids:
            captured = self._remove(sample_id)
            chunks.append(captured.chunk() if captured is not None else None)
        return chunks

    def drop(self, sample_ids: Iterable[str]) -> None:
        for sample_id in sample_ids:
            self._remove(sample_id)

    def _remove(self, sample_id: str) -> CapturedRequest | None:
        return self._running.pop(sample_id, None) or self._finished.pop(sample_id, None)
