"""Policy versions in transit to the rollouts: on disk, written atomically and pruned, or from memory."""

import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import xxhash
from trivet.v1 import weights_pb2

from services.common.config import WeightsConfig
from services.common.errors import InvalidData
from services.common.logs import get_logger
from services.common.run_files.atomic import removed_on_failure
from services.common.transport.outages import Outages
from services.common.transport.weight_feed import WeightFeed, describe_weights, verify_weights
from services.trainer.engine.protocol import TrainEngine
from services.trainer.export.tensors import WeightSource
from services.trainer.metrics import counters
from services.trainer.weights.transfer import WeightTransfer

log = get_logger(__name__)


class Publisher:
    """Versions on disk."""

    def __init__(self, directory: Path, feed: WeightFeed, keep: int, outages: Outages) -> None:
        self._directory, self._feed, self._keep, self._outages = directory.absolute(), feed, keep, outages
        self._directory.mkdir(parents=True, exist_ok=True)
        self._published: list[Path] = []

    def staging(self) -> Path:
        """Where the engine exports to; on the same file system, so that publishing is a rename."""
        path = self._directory / "staging"
        shutil.rmtree(path, ignore_errors=True)
        return path

    def store(self, staged: Path, version: int) -> weights_pb2.WeightVersion:
        """Names the directory by version and content, and removes versions that are no longer loaded."""
        described = describe_weights(staged, version)
        final = self._directory / f"v{version:06d}-{described.fingerprint[:8]}"
        described.path = str(final)
        if _published(described):
            # The same weights, published before a restart.
            shutil.rmtree(staged)
        else:
            shutil.rmtree(final, ignore_errors=True)
            staged.rename(final)
        counters.PUBLISHED_BYTES.set(sum(file.size for file in described.files))
        self._prune(final)
        return described

    def announce(self, weights: weights_pb2.WeightVersion) -> None:
        self._outages.ride_out_blocking(lambda: self._feed.announce(weights))

    def _prune(self, newest: Path) -> None:
        self._published = [path for path in self._published if path != newest] + [newest]
        kept = set(self._published[-self._keep :])
        for path in self._directory.glob("v*"):
            if path not in kept:
                shutil.rmtree(path)
        self._published = self._published[-self._keep :]


def _published(weights: weights_pb2.WeightVersion) -> bool:
    """Whether they are there already, undamaged."""
    if not Path(weights.path).exists():
        return False
    try:
        verify_weights(weights)
    except InvalidData as error:
        log.warning("published weights are damaged: written again", reason=str(error))
        return False
    return True


class Release:
    """What rank 0 decides and does about one version after the other."""

    def __init__(self, publisher: Publisher, config: WeightsConfig, transfer: WeightTransfer | None = None) -> None:
        """`transfer` hands versions over in memory; without it each goes to disk."""
        self._publisher, self._every, self._transfer = publisher, config.disk_every, transfer
        # Weights of one version can differ between two lives of the trainer.
        self._life = uuid.uuid4().hex
        self._first = True
        self._weights = weights_pb2.WeightVersion()
        self._everybody = False

    def plan(self, version: int, *, durable: bool) -> weights_pb2.PublicationPlan:
        """`durable` versions go to disk in any case, as does one that a rollout would miss."""
        self._weights = weights_pb2.WeightVersion(
            version=version, fingerprint=self._name(version), published_at=time.time()
        )
        covered = self._transfer is not None and self._transfer.prepare()
        disk = not covered or durable or self._first or version % self._every == 0
        self._first = False
        self._everybody = disk
        return weights_pb2.PublicationPlan(
            staging=str(self._publisher.staging()) if disk else "",
            transfer=self._transfer is not None and bool(self._transfer.group),
        )

    def stored(self, staged: Path) -> None:
        self._weights = self._publisher.store(staged, self._weights.version)

    def send(self, source: WeightSource) -> None:
        if self._transfer is not None:
            sent = self._transfer.send(self._weights, iter(source))
            self._everybody = self._everybody or sent

    def rest(self) -> weights_pb2.PublicationPlan:
        """What is left to do for those that the version did not reach."""
        return weights_pb2.PublicationPlan(staging="" if self._everybody else str(self._publisher.staging()))

    def announce(self) -> None:
        self._publisher.announce(self._weights)

    def close(self) -> None:
        if self._transfer is not None:
            self._transfer.close()

    def _name(self, version: int) -> str:
        return xxhash.xxh3_64_hexdigest(f"{self._life}/{version}".encode())


class Publication:
    """Every rank's part; rank 0 has a `release`."""

    def __init__(self, engine: TrainEngine, source: WeightSource | None, release: Release | None) -> None:
        """`source` is needed where versions are handed over in memory."""
        self._engine, self._source, self._release = engine, source, release

    def publish(self, version: int, *, durable: bool) -> None:
        """Returns once every rollout has the version or can load it. Collective."""
        plan = self._shared(lambda release: release.plan(version, durable=durable))
        self._export(plan)
        if plan.transfer:
            self._send()
            self._export(self._shared(Release.rest))
        if self._release is not None:
            self._release.announce()

    def _send(self) -> None:
        if self._source is None:
            raise ValueError("versions are to be handed over in memory, but there is no source of their tensors")
        if self._release is not None:
            self._release.send(self._source)
        else:
            self._source.gather()

    def _export(self, plan: weights_pb2.PublicationPlan) -> None:
        if not plan.staging:
            return
        staged = Path(plan.staging)
        with removed_on_failure(staged, mine=self._release is not None):
            self._engine.export(staged)
        if self._release is not None:
            self._release.stored(staged)

    def _shared(self, decide: Callable[[Release], weights_pb2.PublicationPlan]) -> weights_pb2.PublicationPlan:
        """Rank 0's decision on every rank."""
        data = None if self._release is None else decide(self._release).SerializeToString()
        return weights_pb2.PublicationPlan.FromString(self._engine.broadcast_bytes(data))
