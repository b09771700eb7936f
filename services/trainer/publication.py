"""Policy versions on disk: written whole or not at all, announced, and pruned."""

import shutil
from pathlib import Path

from trivet.v1 import weights_pb2

from services.common.weights import WeightFeed, describe_weights
from services.trainer import metrics


class Publisher:
    def __init__(self, directory: Path, feed: WeightFeed, keep: int) -> None:
        self._directory, self._feed, self._keep = directory.absolute(), feed, keep
        self._directory.mkdir(parents=True, exist_ok=True)
        self._published: list[Path] = []

    def staging(self) -> Path:
        """Where the engine exports to; on the same file system, so that publishing is a rename."""
        path = self._directory / "staging"
        shutil.rmtree(path, ignore_errors=True)
        return path

    def publish(self, staged: Path, version: int) -> weights_pb2.WeightVersion:
        """Names the directory by version and content, announces it, and removes versions that nobody loads any more."""
        described = describe_weights(staged, version)
        final = self._directory / f"v{version:06d}-{described.fingerprint[:8]}"
        if final.exists():
            # The same weights, published before a restart.
            shutil.rmtree(staged)
        else:
            staged.rename(final)
        described.path = str(final)
        self._feed.announce(described)
        metrics.PUBLISHED_BYTES.set(sum(file.size for file in described.files))
        self._prune(final)
        return described

    def _prune(self, newest: Path) -> None:
        self._published = [path for path in self._published if path != newest] + [newest]
        kept = set(self._published[-self._keep :])
        for path in self._directory.glob("v*"):
            if path not in kept:
                shutil.rmtree(path)
        self._published = self._published[-self._keep :]
