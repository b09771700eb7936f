import asyncio
import errno
import threading

import pytest
import redis
from prometheus_client import REGISTRY

from services.common.config import BlobConfig
from services.common.errors import InvalidData, Outage, Unavailable
from services.common.transport import outages as module
from services.common.transport import weight_feed as weights_module
from services.common.transport.blobs import Blob, open_blobs
from services.common.transport.outages import Outages
from services.common.transport.weight_feed import describe_weights, verify_weights


@pytest.fixture
def full_redis(redis_client):
    """At its maxmemory until the test sets it free."""
    redis_client.config_set("maxmemory", 1)
    yield redis_client
    redis_client.config_set("maxmemory", 0)


def counted(code):
    return REGISTRY.get_sample_value("trivet_outages_total", {"code": code}) or 0.0


class Store:
    def __init__(self, failures):
        self.failures = failures

    def work(self):
        if self.failures:
            raise self.failures.pop(0)
        return "done"

    async def work_async(self):
        return self.work()


async def test_an_outage_is_waited_for_reported_once_and_forgotten(monkeypatch):
    monkeypatch.setattr(module, "FIRST_SECONDS", 0.01)
    outages, before = Outages(limit_seconds=10), counted("store_full")
    stores = [Store([Outage("store_full", "no space left")] * 3) for _ in range(4)]
    waiting = [asyncio.create_task(outages.ride_out(store.work_async)) for store in stores]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert outages.problem == "waiting: no space left"
    assert await asyncio.gather(*waiting) == ["done"] * 4
    assert outages.problem is None
    assert counted("store_full") == before + 1
    store = Store([Outage("store_full", "again")])
    assert outages.ride_out_blocking(store.work) == "done"
    assert counted("store_full") == before + 2


def test_an_outage_over_the_limit_is_raised_as_it_is():
    outages = Outages(limit_seconds=0.0)
    with pytest.raises(Outage, match="no space left"):
        outages.ride_out_blocking(Store([Outage("store_full", "no space left")] * 9).work)
    assert outages.problem is None


def test_whoever_polls_hears_of_an_outage_and_of_its_end():
    outages = Outages(limit_seconds=10)
    store = Store([Outage("store_full", "no space left")])
    assert outages.poll(store.work) is None
    assert outages.problem == "waiting: no space left"
    assert outages.poll(store.work) == "done"
    assert outages.problem is None


def test_what_is_no_outage_is_not_waited_for():
    with pytest.raises(Unavailable, match="gone"):
        Outages(limit_seconds=10).ride_out_blocking(Store([Unavailable("redis_unreachable", "gone")]).work)


@pytest.mark.parametrize("transaction", [True, False])
def test_a_full_redis_is_an_outage(full_redis, transaction):
    with pytest.raises(Outage) as alone:
        full_redis.set("key", "value")
    with full_redis.pipeline(transaction=transaction) as pipe:
        pipe.xadd("stream", {"a": "b"})
        with pytest.raises(Outage, match="maxmemory") as together:
            pipe.execute()
    assert alone.value.code == together.value.code == "redis_memory"
    assert full_redis.get("key") is None


def test_a_redis_that_takes_no_writes_is_an_outage(redis_client):
    redis_client.replicaof("127.0.0.1", 1)
    try:
        with pytest.raises(Outage) as refusal:
            redis_client.set("key", "value")
    finally:
        redis_client.replicaof("NO", "ONE")
    assert refusal.value.code == "redis_readonly"


def test_a_redis_whose_disk_is_full_is_an_outage(redis_client, monkeypatch):
    def refuse(*_, **__):
        raise redis.ResponseError("MISCONF Errors writing to the AOF file: No space left on device")

    monkeypatch.setattr(redis.Redis, "execute_command", refuse)
    with pytest.raises(Outage, match="No space left") as refusal:
        redis_client.set("key", "value")
    monkeypatch.undo()
    assert refusal.value.code == "redis_disk"


def test_a_wrong_password_is_no_outage(redis_client, monkeypatch):
    def refuse(*_, **__):
        raise redis.AuthenticationError("invalid username-password pair")

    monkeypatch.setattr(redis.Redis, "execute_command", refuse)
    with pytest.raises(redis.AuthenticationError):
        redis_client.ping()
    monkeypatch.undo()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES])
def test_a_store_that_takes_nothing_is_an_outage(tmp_path, redis_client, monkeypatch, number):
    blobs = open_blobs(BlobConfig(url=f"file://{tmp_path}/blobs"), redis_client, "run")

    def fail(*_):
        raise OSError(number, "cannot")

    monkeypatch.setattr(blobs._files, "pipe_file", fail)
    with pytest.raises(Outage, match="could not be written") as refusal:
        blobs.put("g0/0/0", b"one")
    assert refusal.value.code == "blob_store"


def test_one_blob_that_cannot_be_read_is_a_damaged_one(tmp_path, redis_client, monkeypatch):
    """Its group is sampled again; waiting would not bring it back."""
    blobs = open_blobs(BlobConfig(url=f"file://{tmp_path}/blobs"), redis_client, "run")
    reference = blobs.put("g0/0/0", b"one")

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(blobs._files, "cat_file", fail)
    with pytest.raises(InvalidData, match="Input/output error") as refusal:
        blobs.get(Blob("g0/0/0", reference))
    assert refusal.value.code == "blob_corrupt"


def test_a_blobs_key_that_holds_something_else_is_a_damaged_one(redis_client):
    blobs = open_blobs(BlobConfig(), redis_client, "run")
    reference = blobs.put("g0/0/0", b"one")
    redis_client.delete(reference.key)
    redis_client.rpush(reference.key, "one")
    with pytest.raises(InvalidData) as refusal:
        blobs.get(Blob("g0/0/0", reference))
    assert refusal.value.code == "blob_corrupt"


def test_weights_that_cannot_be_read_are_unavailable_and_not_corrupt(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    version = describe_weights(tmp_path, 3)

    def fail(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(weights_module, "_checksum", fail)
    with pytest.raises(Unavailable, match="Input/output error") as refusal:
        verify_weights(version)
    assert refusal.value.code == "weights_unreadable"


def test_a_service_starts_when_redis_takes_something_again(full_redis, redis_config):
    from services.common.transport.streams import RunStreams

    threading.Timer(0.5, full_redis.config_set, ["maxmemory", 0]).start()
    outages = Outages(limit_seconds=20)
    stream = outages.ride_out_blocking(lambda: RunStreams(full_redis, "run", redis_config).prompts("a"))
    assert stream.read(1, 0.01) == []
