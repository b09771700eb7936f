import boto3
import pytest
from moto.server import ThreadedMotoServer

from services.common import metrics
from services.common.blobs import open_blobs
from services.common.config import BlobConfig
from services.common.errors import InvalidData, Unavailable

BUCKET = "blobs"


@pytest.fixture(scope="module")
def object_store():
    """A real S3 interface: it speaks HTTP to s3fs like any other."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as environment:
        address = "http://{}:{}".format(*server.get_host_and_port())
        for name, value in (
            ("AWS_ENDPOINT_URL", address),
            ("AWS_ACCESS_KEY_ID", "key"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
            ("AWS_MAX_ATTEMPTS", "1"),
        ):
            environment.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield server
    server.stop()


@pytest.fixture(params=["redis", "file", "s3"])
def blobs(request, tmp_path, redis_client):
    if request.param == "s3":
        request.getfixturevalue("object_store")
    url = {"redis": "redis", "file": f"file://{tmp_path}/blobs", "s3": f"s3://{BUCKET}/replay"}[request.param]
    return open_blobs(BlobConfig(url=url, max_bytes=100), redis_client, "run")


def test_what_is_put_is_got_until_it_is_deleted(blobs):
    first, second = blobs.put("g0/0/0", b"one"), blobs.put("g0/0/1", b"two")
    assert (blobs.get(first), blobs.get(second)) == (b"one", b"two")
    blobs.delete([first])
    with pytest.raises(InvalidData) as refusal:
        blobs.get(first)
    assert refusal.value.code == "blob_missing"
    blobs.delete([first, second])


def test_a_sample_drawn_twice_leaves_the_first_blob_alone(blobs):
    first, second = blobs.put("g0/0/0", b"one"), blobs.put("g0/0/0", b"two")
    assert (blobs.get(first), blobs.get(second)) == (b"one", b"two")


def test_a_damaged_blob_is_noticed(blobs):
    reference = blobs.put("g0/0/0", b"one")
    reference.checksum ^= 1
    with pytest.raises(InvalidData) as refusal:
        blobs.get(reference)
    assert refusal.value.code == "blob_corrupt"


def test_a_blob_over_the_limit_is_refused(blobs):
    with pytest.raises(InvalidData, match="101 bytes, at most 100 allowed"):
        blobs.put("g0/0/0", bytes(101))


def test_a_forgotten_blob_expires(redis_client):
    blobs = open_blobs(BlobConfig(ttl_seconds=50), redis_client, "run")
    reference = blobs.put("g0/0/0", b"one")
    assert 0 < redis_client.ttl(reference.key) <= 50


def test_an_object_store_that_refuses_is_unavailable_and_makes_no_bucket(object_store, redis_client):
    blobs = open_blobs(BlobConfig(url="s3://misspelt/replay", max_bytes=100), redis_client, "run")
    with pytest.raises(Unavailable, match="misspelt/replay/run/g0_0_0-[0-9a-f]{16} could not be written"):
        blobs.put("g0/0/0", b"one")
    assert [bucket["Name"] for bucket in boto3.client("s3").list_buckets()["Buckets"]] == [BUCKET]


def test_a_store_out_of_reach_is_unavailable_and_leaves_blobs_behind(tmp_path, redis_client, monkeypatch):
    blobs = open_blobs(BlobConfig(url=f"file://{tmp_path}/blobs"), redis_client, "run")
    reference = blobs.put("g0/0/0", b"one")

    class LibraryError(Exception):
        """Like botocore's, no OSError."""

    def fail(*_):
        raise LibraryError("no answer")

    for name in ("pipe_file", "cat_file", "rm_file"):
        monkeypatch.setattr(blobs._files, name, fail)
    before = metrics.BLOB_FAILURES.labels("blob_store")._value.get()
    with pytest.raises(Unavailable, match="could not be written .no answer"):
        blobs.put("g0/0/0", b"two")
    with pytest.raises(Unavailable, match="could not be read .no answer"):
        blobs.get(reference)
    blobs.delete([reference, reference])
    assert metrics.BLOB_FAILURES.labels("blob_store")._value.get() == before + 3
