"""Scores already computed, by everything that they depend on."""

import hashlib
import json

from cachetools import LRUCache
from trivet.v1 import sample_pb2

from services.common.config import ScorerConfig
from services.reward import metrics


class ScoreCache:
    """The `size` most recently used scores. Keys are digests, so that long completions do not stay in memory."""

    def __init__(self, size: int) -> None:
        self._scores: LRUCache[bytes, float] = LRUCache(size)

    def get(self, key: bytes) -> float | None:
        return self._scores.get(key)

    def put(self, key: bytes, score: float) -> None:
        if self._scores.maxsize >= 1:
            self._scores[key] = score
            metrics.CACHE_ENTRIES.set(len(self._scores))

    def __len__(self) -> int:
        return len(self._scores)


def cache_key(scorer: ScorerConfig, prompt: sample_pb2.Prompt, sample: sample_pb2.Sample) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    options = json.dumps(scorer.options, sort_keys=True, default=repr)
    for part in (scorer.name, options, prompt.text, sample.text, prompt.metadata_json):
        data = part.encode(errors="surrogatepass")
        # With its length before it, no part can flow into the next.
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()
