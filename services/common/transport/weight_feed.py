"""Policy versions: what the trainer publishes and the rollouts load."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import redis
import xxhash
from trivet.v1 import weights_pb2

from services.common import metrics
from services.common.errors import InvalidData, Unavailable
from services.common.logs import get_logger
from services.common.transport.dead_letters import FIELD, DeadLetters, dead_letter, parse_entry

# The newest counts; older ones are kept only to be looked at.
ANNOUNCEMENTS_KEPT = 64
READ_BYTES = 4 * 2**20
MAX_BLOCK_SECONDS = 5.0
# A rollout that still finds its version damaged reports that again, at its next try.
DAMAGE_REPORT_SECONDS = 120

log = get_logger(__name__)


def describe_weights(directory: Path, version: int) -> weights_pb2.WeightVersion:
    """Reads every file once for its checksum. Raises InvalidData when there are no safetensors."""
    names = sorted(path.name for path in directory.iterdir() if path.is_file())
    if not any(name.endswith(".safetensors") for name in names):
        raise InvalidData("weights_missing", f"{directory} has no .safetensors file")
    files = [
        weights_pb2.WeightFile(name=name, size=(directory / name).stat().st_size, checksum=_checksum(directory / name))
        for name in names
    ]
    return weights_pb2.WeightVersion(
        version=version, path=str(directory), files=files, fingerprint=_fingerprint(files), published_at=time.time()
    )


def check_location(weights: weights_pb2.WeightVersion, root: Path) -> None:
    """Raises InvalidData ("weights_outside") unless the files lie in one directory below `root`, links followed. The
    reason is the same whether or not anything else exists."""
    try:
        directory = Path(weights.path).resolve()
        inside = root.resolve() in directory.parents and all(
            (directory / file.name).resolve().parent == directory for file in weights.files
        )
    except (OSError, RuntimeError, ValueError):
        # A loop of links, a name that no file can have.
        inside = False
    if not inside:
        raise InvalidData(
            "weights_outside",
            f"weights.path is {weights.path[:200]!r}, expected a directory below {root} (run.directory, run.name) and "
            "names of files in it",
        )


def verify_weights(weights: weights_pb2.WeightVersion) -> None:
    """Raises InvalidData ("weights_missing", "weights_corrupt") unless the files are those that were published, and
    Unavailable ("weights_unreadable") where they cannot be read."""
    try:
        _verify(weights)
    except OSError as error:
        raise Unavailable("weights_unreadable", f"{weights.path} cannot be read ({error})") from error


def same_weights(one: weights_pb2.WeightVersion, other: weights_pb2.WeightVersion) -> bool:
    return bool(one.fingerprint) and (one.version, one.fingerprint) == (other.version, other.fingerprint)


class WeightFeed:
    """Announcements of policy versions, to every rollout alike: the newest announcement holds, whatever its number.

    An entry that is no announcement goes to the dead letters.
    """

    def __init__(self, client: redis.Redis, run: str) -> None:
        self._client, self._name, self._damage_key = client, f"{run}:weights", f"{run}:weights:damaged"
        self._dead_letters = DeadLetters(client, run)
        self._announced: weights_pb2.WeightVersion | None = None

    def announce(self, weights: weights_pb2.WeightVersion) -> None:
        self._announced = weights
        self._client.xadd(self._name, {FIELD: weights.SerializeToString()}, maxlen=ANNOUNCEMENTS_KEPT)

    def keep_announced(self) -> None:
        """Announces again what was announced last, if Redis has lost it."""
        found = self.latest()
        if self._announced is not None and (found is None or not same_weights(found[1], self._announced)):
            metrics.VERSIONS_ANNOUNCED_AGAIN.inc()
            log.warning("Redis had lost the newest version, announced again", version=self._announced.version)
            self.announce(self._announced)

    def report_damaged(self, announcement: str) -> None:
        """By a rollout: the files of the version that the announcement of this id names are not what it says."""
        self._client.set(self._damage_key, announcement, ex=DAMAGE_REPORT_SECONDS)

    def take_damaged(self) -> bool:
        """Whether a rollout has reported the newest announcement since the last call."""
        reported = cast(bytes | None, self._client.getdel(self._damage_key))
        found = self.latest() if reported is not None else None
        return found is not None and found[0].encode() == reported

    @property
    def only_in_memory(self) -> bool:
        """Whether what was announced last is nowhere on disk."""
        return self._announced is not None and not self._announced.path

    def latest(self) -> tuple[str, weights_pb2.WeightVersion] | None:
        """The newest announcement and its id."""
        return next(self._newest_first(), None)

    def latest_on_disk(self) -> tuple[str, weights_pb2.WeightVersion] | None:
        """The newest announcement that can be loaded from disk, and its id."""
        return next((found for found in self._newest_first() if found[1].path), None)

    def newest_version(self) -> int:
        """The highest version that was announced, 0 without any."""
        return max((weights.version for _, weights in self._newest_first()), default=0)

    def wait(self, after: str | None, timeout_seconds: float) -> tuple[str, weights_pb2.WeightVersion] | None:
        """Like `latest`, once there is one after that with id `after`, or the time is up."""
        block = max(1, round(min(timeout_seconds, MAX_BLOCK_SECONDS) * 1000))
        self._client.xread({self._name: after or "0-0"}, block=block)
        return self.latest()

    def _newest_first(self) -> Iterator[tuple[str, weights_pb2.WeightVersion]]:
        newest, count = "+", 1
        while rows := cast(list[Any], self._client.xrevrange(self._name, max=newest, count=count)):
            for raw_id, fields in rows:
                entry_id = raw_id.decode()
                try:
                    yield entry_id, _announcement(fields)
                except InvalidData as error:
                    self._drop(entry_id, fields, error)
            newest, count = f"({entry_id}", ANNOUNCEMENTS_KEPT

    def _drop(self, entry_id: str, fields: dict[bytes, bytes], error: InvalidData) -> None:
        # Every rollout meets it, and one of them writes the letter.
        if self._client.xdel(self._name, entry_id):
            log.warning("announcement dropped", entry=entry_id, code=error.code, reason=str(error))
            self._dead_letters.report(dead_letter("weights", entry_id, fields.get(FIELD, b""), error))


def _announcement(fields: dict[bytes, bytes]) -> weights_pb2.WeightVersion:
    weights = parse_entry(fields, weights_pb2.WeightVersion)
    if not weights.fingerprint:
        raise InvalidData("fingerprint_missing", f"announced version {weights.version} has no fingerprint")
    return weights


def _verify(weights: weights_pb2.WeightVersion) -> None:
    for file in weights.files:
        path = Path(weights.path) / file.name
        if not path.is_file():
            raise InvalidData("weights_missing", f"{path} of version {weights.version} does not exist")
        size = path.stat().st_size
        if size != file.size:
            raise InvalidData("weights_corrupt", f"{path} has {size} bytes, expected {file.size}")
        checksum = _checksum(path)
        if checksum != file.checksum:
            raise InvalidData("weights_corrupt", f"{path} has checksum {checksum:016x}, expected {file.checksum:016x}")
    if _fingerprint(list(weights.files)) != weights.fingerprint:
        raise InvalidData("weights_corrupt", f"version {weights.version} has a fingerprint that is not its files'")


def _checksum(path: Path) -> int:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
    return digest.intdigest()


def _fingerprint(files: list[weights_pb2.WeightFile]) -> str:
    digest = xxhash.xxh3_64()
    for file in files:
        digest.update(f"{file.name}:{file.checksum:016x};".encode())
    return digest.hexdigest()
