import pytest

from services.common.blobs import open_blobs
from services.common.config import BlobConfig
from services.common.errors import InvalidData


@pytest.fixture(params=["redis", "file"])
def blobs(request, tmp_path, redis_client):
    url = "redis" if request.param == "redis" else f"file://{tmp_path}/blobs"
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
