"""Replay data, outside the streams: in Redis, or in any fsspec store."""

import errno
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Protocol, cast

import fsspec
import redis
import xxhash
from fsspec.implementations.local import LocalFileSystem
from trivet.v1 import tensor_pb2

from services.common import metrics
from services.common.config import BlobConfig, ConfigError
from services.common.errors import InvalidData, Outage, Unavailable, one_sentence
from services.common.logs import get_logger
from services.common.secrets import without_secrets

# An unknown scheme or one whose package is missing, a place that is not there, no permission, a store only to read.
_UNUSABLE = (
    ValueError,
    ImportError,
    FileNotFoundError,
    NotADirectoryError,
    FileExistsError,
    PermissionError,
    NotImplementedError,
)

log = get_logger(__name__)


class Blob(NamedTuple):
    """A reference as it came with a sample, which must be the sample's own."""

    sample_id: str
    reference: tensor_pb2.BlobReference


class BlobStore(Protocol):
    def put(self, sample_id: str, data: bytes) -> tensor_pb2.BlobReference:
        """Raises InvalidData for a blob over the limit, Outage when the store does not answer."""

    def get(self, blob: Blob) -> bytes:
        """Raises InvalidData ("blob_missing", "blob_corrupt", "blob_foreign" for a reference to anything but the
        sample's own blob), or Outage when the store does not answer."""

    def sweep(self, is_over: Callable[[str], bool]) -> None:
        """Deletes all blobs of groups that are over, by group id, whether a sample refers to them or not. Where the
        store does not answer they stay for the next time."""


def open_blobs(config: BlobConfig, client: redis.Redis, run: str) -> BlobStore:
    if config.url == "redis":
        return RedisBlobs(config, client, run)
    return FsspecBlobs(config, run)


class RedisBlobs:
    def __init__(self, config: BlobConfig, client: redis.Redis, run: str) -> None:
        self._config, self._client, self._prefix = config, client, f"{run}:blob:"

    def put(self, sample_id: str, data: bytes) -> tensor_pb2.BlobReference:
        reference = _reference(self._prefix + sample_id, data, self._config.max_bytes)
        with metrics.BLOB_SECONDS.labels("put").time():
            self._client.set(reference.key, data, ex=self._config.ttl_seconds)
        return reference

    def get(self, blob: Blob) -> bytes:
        key = _own_key(self._prefix + blob.sample_id, blob)
        with metrics.BLOB_SECONDS.labels("get").time():
            try:
                data = cast(bytes | None, self._client.get(key))
            except redis.ResponseError as error:
                # Something that is no string lies there.
                raise _corrupt(key, error) from error
        return _checked(blob.reference, data)

    def sweep(self, is_over: Callable[[str], bool]) -> None:
        found = self._client.scan_iter(match=f"{self._prefix}*", count=1000)
        group_id = {key: key.decode(errors="replace").removeprefix(self._prefix).partition("/")[0] for key in found}
        if over := [key for key in group_id if is_over(group_id[key])]:
            self._client.unlink(*over)


class FsspecBlobs:
    """A store's own retries are what is tried; its credentials and address come from the environment, as it wants."""

    def __init__(self, config: BlobConfig, run: str) -> None:
        """Raises ConfigError for a store that cannot be used, Unavailable for one that does not answer."""
        self._config = config
        with _opening(config.url):
            self._files, root = cast(tuple[Any, str], fsspec.core.url_to_fs(config.url))
            self._root = f"{root.rstrip('/')}/{run}"
            self._local = isinstance(self._files, LocalFileSystem)
            # An object store has no directories; asking for one would make a bucket of a misspelt name.
            if self._local:
                self._files.makedirs(self._root, exist_ok=True)
            probe = self._path(f"probe-{uuid.uuid4().hex}")
            self._files.pipe_file(probe, b"probe")
        self._remove([probe])

    def put(self, sample_id: str, data: bytes) -> tensor_pb2.BlobReference:
        reference = _reference(self._path(sample_id), data, self._config.max_bytes)
        with _naming(reference.key, "written"), metrics.BLOB_SECONDS.labels("put").time():
            self._files.pipe_file(reference.key, data)
        return reference

    def get(self, blob: Blob) -> bytes:
        key = self._own_key(blob)
        data: bytes | None = None
        with _naming(key, "read"), metrics.BLOB_SECONDS.labels("get").time():
            try:
                data = self._files.cat_file(key)
            except FileNotFoundError:
                data = None
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                raise _corrupt(key, error) from error
        return _checked(blob.reference, data)

    def sweep(self, is_over: Callable[[str], bool]) -> None:
        try:
            with _naming(self._root, "listed"), suppress(FileNotFoundError):
                found = self._files.ls(self._root, detail=False, refresh=True)
                self._remove(path for path in found if is_over(path.rpartition("/")[2].partition("_")[0]))
        except Unavailable as error:
            log.warning("blobs left behind", store=self._root, error=str(error))

    def _remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            try:
                with _naming(key, "deleted"), suppress(FileNotFoundError):
                    self._files.rm_file(key)
            except Unavailable as error:
                log.warning("blobs left behind", first=key, error=str(error))
                return

    def _path(self, sample_id: str) -> str:
        return f"{self._root}/{sample_id.replace('/', '_')}"

    def _own_key(self, blob: Blob) -> str:
        key = _own_key(self._path(blob.sample_id), blob)
        if self._local and os.path.islink(key):
            raise _foreign(blob, "a file, not a symbolic link")
        return key


@contextmanager
def _opening(url: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # as in _naming
        if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise Outage("blob_store", f"blobs.url: {one_sentence(error)}") from error
        sentence = without_secrets(
            f"blobs.url is {url!r}, expected a store that can be written ({one_sentence(error)})"
        )
        if isinstance(error, _UNUSABLE):
            raise ConfigError(sentence) from error
        raise Unavailable("blob_store", sentence) from error


@contextmanager
def _naming(key: str, done: str) -> Iterator[None]:
    try:
        yield
    except InvalidData:
        raise
    except Exception as error:  # each store's library has errors of its own, with no class in common
        metrics.BLOB_FAILURES.labels("blob_store").inc()
        raise Outage("blob_store", f"blob {key} could not be {done} ({error})") from error


def _own_key(name: str, blob: Blob) -> str:
    """The key under which `put` stores what is named so. Raises InvalidData for a reference to anything else."""
    key = _key(name, blob.reference.checksum)
    if blob.reference.key != key:
        raise _foreign(blob, repr(key))
    return key


def _foreign(blob: Blob, expected: str) -> InvalidData:
    metrics.BLOB_FAILURES.labels("blob_foreign").inc()
    return InvalidData(
        "blob_foreign", f"replay.key of sample {blob.sample_id} is {blob.reference.key[:200]!r}, expected {expected}"
    )


def _key(name: str, checksum: int) -> str:
    # Named by content, so that a sample drawn a second time does not overwrite what the first one refers to.
    return f"{name}-{checksum:016x}"


def _reference(name: str, data: bytes, limit: int) -> tensor_pb2.BlobReference:
    if len(data) > limit:
        raise InvalidData(
            "blob_too_large", f"blob {name} has {len(data)} bytes, at most {limit} allowed (blobs.max_bytes)"
        )
    metrics.BLOB_BYTES.labels("put").inc(len(data))
    checksum = xxhash.xxh3_64_intdigest(data)
    return tensor_pb2.BlobReference(key=_key(name, checksum), size=len(data), checksum=checksum)


def _corrupt(key: str, error: Exception) -> InvalidData:
    metrics.BLOB_FAILURES.labels("blob_corrupt").inc()
    return InvalidData("blob_corrupt", f"blob {key} cannot be read ({error})")


def _checked(reference: tensor_pb2.BlobReference, data: bytes | None) -> bytes:
    if data is None:
        metrics.BLOB_FAILURES.labels("blob_missing").inc()
        raise InvalidData("blob_missing", f"blob {reference.key} is missing")
    checksum = xxhash.xxh3_64_intdigest(data)
    if checksum != reference.checksum:
        metrics.BLOB_FAILURES.labels("blob_corrupt").inc()
        raise InvalidData(
            "blob_corrupt",
            f"blob {reference.key} has checksum {checksum:016x} over {len(data)} bytes, "
            f"expected {reference.checksum:016x} over {reference.size}",
        )
    metrics.BLOB_BYTES.labels("get").inc(len(data))
    return data
