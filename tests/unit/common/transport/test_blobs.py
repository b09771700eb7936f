import errno

import boto3
import pytest
from fsspec.implementations.local import LocalFileSystem
from moto.server import ThreadedMotoServer

from services.common import metrics
from services.common.config import BlobConfig, ConfigError
from services.common.errors import InvalidData, Outage, Unavailable
from services.common.transport.blobs import Blob, open_blobs

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


def stored(blobs, sample_id, data):
    return Blob(sample_id, blobs.put(sample_id, data))


def overwrite(blobs, key, data):
    if hasattr(blobs, "_files"):
        blobs._files.pipe_file(key, data)
    else:
        blobs._client.set(key, data)


def test_what_is_put_is_got_until_its_group_is_over(blobs):
    first, second = stored(blobs, "g0/0/0", b"one"), stored(blobs, "g1/0/0", b"two")
    assert (blobs.get(first), blobs.get(second)) == (b"one", b"two")
    for _ in range(2):
        blobs.sweep(lambda group_id: group_id == "g0")
    with pytest.raises(InvalidData) as refusal:
        blobs.get(first)
    assert refusal.value.code == "blob_missing"
    assert blobs.get(second) == b"two"


def test_a_sample_drawn_twice_leaves_the_first_blob_alone(blobs):
    first, second = stored(blobs, "g0/0/0", b"one"), stored(blobs, "g0/0/0", b"two")
    assert (blobs.get(first), blobs.get(second)) == (b"one", b"two")


def test_a_damaged_blob_is_noticed(blobs):
    blob = stored(blobs, "g0/0/0", b"one")
    overwrite(blobs, blob.reference.key, b"two")
    with pytest.raises(InvalidData) as refusal:
        blobs.get(blob)
    assert refusal.value.code == "blob_corrupt"


def test_a_blob_over_the_limit_is_refused(blobs):
    with pytest.raises(InvalidData, match="101 bytes, at most 100 allowed"):
        blobs.put("g0/0/0", bytes(101))


def test_a_forgotten_blob_expires(redis_client):
    blobs = open_blobs(BlobConfig(ttl_seconds=50), redis_client, "run")
    reference = blobs.put("g0/0/0", b"one")
    assert 0 < redis_client.ttl(reference.key) <= 50


def test_a_misspelt_bucket_is_refused_and_not_made(object_store, redis_client):
    with pytest.raises(ConfigError, match="blobs.url is 's3://misspelt/replay', expected a store that can be written"):
        open_blobs(BlobConfig(url="s3://misspelt/replay"), redis_client, "run")
    assert [bucket["Name"] for bucket in boto3.client("s3").list_buckets()["Buckets"]] == [BUCKET]


@pytest.mark.parametrize(
    ("url", "kind", "words"),
    [
        ("s4://bucket/replay", ConfigError, "Protocol not known"),
        ("file://{path}/a-file/blobs", ConfigError, "Not a directory"),
        ("file:///proc/blobs", ConfigError, "No such file"),
        ("http://user:hunter2@127.0.0.1:1/replay", Unavailable, "Cannot connect"),
    ],
)
def test_a_store_that_cannot_be_used_is_refused_as_it_is_opened(tmp_path, redis_client, url, kind, words):
    (tmp_path / "a-file").touch()
    url = url.format(path=tmp_path)
    with pytest.raises(kind, match=words) as refusal:
        open_blobs(BlobConfig(url=url), redis_client, "run")
    assert str(refusal.value).startswith(f"blobs.url is {url.replace('user:hunter2', '***')!r}, expected a store")
    assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), ConfigError),
        (TimeoutError("no answer"), Unavailable),
        (OSError(errno.ENOSPC, "No space left on device"), Outage),
    ],
)
def test_a_store_that_does_not_take_a_blob_is_refused_as_it_is_opened(tmp_path, redis_client, monkeypatch, error, kind):
    def fail(*_):
        raise error

    monkeypatch.setattr(LocalFileSystem, "pipe_file", fail)
    with pytest.raises(kind, match="blobs.url") as refusal:
        open_blobs(BlobConfig(url=f"file://{tmp_path}/blobs"), redis_client, "run")
    # Only what is full is waited for.
    assert isinstance(refusal.value, Outage) == (kind is Outage)


def test_opening_a_store_leaves_nothing_in_it(tmp_path, redis_client):
    open_blobs(BlobConfig(url=f"file://{tmp_path}/blobs"), redis_client, "run")
    assert list((tmp_path / "blobs/run").iterdir()) == []


def test_a_store_out_of_reach_is_unavailable_and_leaves_blobs_behind(tmp_path, redis_client, monkeypatch):
    blobs = open_blobs(BlobConfig(url=f"file://{tmp_path}/blobs"), redis_client, "run")
    blob = stored(blobs, "g0/0/0", b"one")

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
        blobs.get(blob)
    blobs.sweep(lambda group_id: True)
    assert len(blobs._files.ls(blobs._root)) == 1
    assert metrics.BLOB_FAILURES.labels("blob_store")._value.get() == before + 3


def refused(blobs, blob):
    before = metrics.BLOB_FAILURES.labels("blob_foreign")._value.get()
    with pytest.raises(InvalidData, match="replay.key of sample g0/0/0 is ") as refusal:
        blobs.get(blob)
    return refusal.value.code == "blob_foreign" and metrics.BLOB_FAILURES.labels("blob_foreign")._value.get() > before


@pytest.mark.parametrize("change", ["", "x", "/../g0_0_1", "\0", "-0000000000000000"])
def test_a_reference_to_anything_but_the_samples_own_blob_is_not_read(blobs, change):
    blob, other = stored(blobs, "g0/0/0", b"one"), stored(blobs, "g0/0/1", b"one")
    assert refused(blobs, Blob("g0/0/0", other.reference))
    blob.reference.key = blob.reference.key + change if change else ""
    assert refused(blobs, blob)
    assert blobs.get(other) == b"one"


def test_a_reference_cannot_read_a_stream(redis_client):
    blobs = open_blobs(BlobConfig(), redis_client, "run")
    redis_client.xadd("run:prompts", {"message": b"prompt"})
    blob = stored(blobs, "g0/0/0", b"one")
    blob.reference.key = "run:prompts"
    assert refused(blobs, blob)
    assert redis_client.xlen("run:prompts") == 1


@pytest.mark.parametrize("form", ["{path}", "file://{path}", "{root}/run/../../outside", "local://{path}"])
def test_a_reference_cannot_leave_the_stores_root(tmp_path, redis_client, form):
    outside = tmp_path / "outside"
    outside.write_bytes(b"one")
    blobs = open_blobs(BlobConfig(url=f"file://{tmp_path}/blobs"), redis_client, "run")
    blob = stored(blobs, "g0/0/0", b"one")
    blob.reference.key = form.format(path=outside, root=f"{tmp_path}/blobs")
    assert refused(blobs, blob)
    assert outside.read_bytes() == b"one"


def test_a_symbolic_link_in_a_blobs_place_is_not_followed(tmp_path, redis_client):
    outside = tmp_path / "outside"
    outside.write_bytes(b"one")
    blobs = open_blobs(BlobConfig(url=f"file://{tmp_path}/blobs"), redis_client, "run")
    blob = stored(blobs, "g0/0/0", b"one")
    (tmp_path / "blobs/run" / blob.reference.key.rpartition("/")[2]).unlink()
    (tmp_path / "blobs/run" / blob.reference.key.rpartition("/")[2]).symlink_to(outside)
    assert refused(blobs, blob)
    assert outside.read_bytes() == b"one"


def test_a_sweep_takes_all_blobs_of_groups_that_are_over_and_no_other(blobs):
    over, under_way = stored(blobs, "h-1/0/0", b"drawn"), stored(blobs, "h-2/0/0", b"kept")
    drawn_again = stored(blobs, "h-1/0/0", b"drawn again")
    blobs.sweep(lambda group_id: group_id == "h-1")
    for gone in (over, drawn_again):
        with pytest.raises(InvalidData):
            blobs.get(gone)
    assert blobs.get(under_way) == b"kept"
