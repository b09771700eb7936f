"""Replay data beside the streams: in Redis, or in any fsspec store."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, cast

import fsspec
import redis
import xxhash
from fsspec.implementations.local import LocalFileSystem
from trivet.v1 import tensor_pb2

from services.common import metrics
from services.common.config import BlobConfig
from services.common.errors import InvalidData, Unavailable
from services.common.logs import get_logger

log = get_logger(__name__)


class BlobStore(Protocol):
    def put(self, key: str, data: bytes) -> tensor_pb2.BlobReference:
        """Raises InvalidData for a blob over the limit, Unavailable when the store does not answer."""

    def get(self, reference: tensor_pb2.BlobReference) -> bytes:
        """Raises InvalidData ("blob_missing", "blob_corrupt"), or Unavailable when the store does not answer."""

    def delete(self, references: Iterable[tensor_pb2.BlobReference]) -> None:
        """Those already gone are passed over. Where the store does not answer they are left behind, and counted."""


def open_blobs(config: BlobConfig, client: redis.Redis, run: str) -> BlobStore:
    if config.url == "redis":
        return RedisBlobs(config, client, run)
    return FsspecBlobs(config, run)


class RedisBlobs:
    def __init__(self, config: BlobConfig, client: redis.Redis, run: str) -> None:
        self._config, self._client, self._prefix = config, client, f"{run}:blob:"

    def put(self, key: str, data: bytes) -> tensor_pb2.BlobReference:
        reference = _reference(self._prefix + key, data, self._config.max_bytes)
        with metrics.BLOB_SECONDS.labels("put").time():
            self._client.set(reference.key, data, ex=self._config.ttl_seconds)
        return reference

    def get(self, reference: tensor_pb2.BlobReference) -> bytes:
        with metrics.BLOB_SECONDS.labels("get").time():
            data = cast(bytes | None, self._client.get(reference.key))
        return _checked(reference, data)

    def delete(self, references: Iterable[tensor_pb2.BlobReference]) -> None:
        keys = [reference.key for reference in references]
        if keys:
            self._client.unlink(*keys)


class FsspecBlobs:
    """A store's own retries are what is tried; its credentials and address come from the environment, as it wants."""

    def __init__(self, config: BlobConfig, run: str) -> None:
        self._config = config
        self._files, root = cast(tuple[Any, str], fsspec.core.url_to_fs(config.url))
        self._root = f"{root.rstrip('/')}/{run}"
        # An object store has no directories; asking for one would make a bucket of a misspelt name.
        if isinstance(self._files, LocalFileSystem):
            self._files.makedirs(self._root, exist_ok=True)

    def put(self, key: str, data: bytes) -> tensor_pb2.BlobReference:
        reference = _reference(f"{self._root}/{key.replace('/', '_')}", data, self._config.max_bytes)
        with _telling(reference.key, "written"), metrics.BLOB_SECONDS.labels("put").time():
            self._files.pipe_file(reference.key, data)
        return reference

    def get(self, reference: tensor_pb2.BlobReference) -> bytes:
        data: bytes | None = None
        with _telling(reference.key, "read"), metrics.BLOB_SECONDS.labels("get").time():
            try:
                data = self._files.cat_file(reference.key)
            except FileNotFoundError:
                data = None
        return _checked(reference, data)

    def delete(self, references: Iterable[tensor_pb2.BlobReference]) -> None:
        for reference in references:
            try:
                with _telling(reference.key, "deleted"), suppress(FileNotFoundError):
                    self._files.rm_file(reference.key)
            except Unavailable as error:
                log.warning("blobs left behind", first=reference.key, error=str(error))
                return


@contextmanager
def _telling(key: str, done: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each store's library has errors of its own, with no class in common
        metrics.BLOB_FAILURES.labels("blob_store").inc()
        raise Unavailable("blob_store", f"blob {key} could not be {done} ({error})") from error


def _reference(key: str, data: bytes, limit: int) -> tensor_pb2.BlobReference:
    if len(data) > limit:
        raise InvalidData(
            "blob_too_large", f"blob {key} has {len(data)} bytes, at most {limit} allowed (blobs.max_bytes)"
        )
    metrics.BLOB_BYTES.labels("put").inc(len(data))
    checksum = xxhash.xxh3_64_intdigest(data)
    # Named by content, so that a sample drawn a second time does not overwrite what the first one refers to.
    return tensor_pb2.BlobReference(key=f"{key}-{checksum:016x}", size=len(data), checksum=checksum)


def _checked(reference: tensor_pb2.BlobReference, data: bytes | None) -> bytes:
    if data is None:
        metrics.BLOB_FAILURES.labels("blob_missing").inc()
        raise InvalidData("blob_missing", f"blob {reference.key} is gone")
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
