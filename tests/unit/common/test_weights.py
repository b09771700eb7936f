import threading

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.common.errors import InvalidData
from services.common.weights import WeightFeed, describe_weights, verify_weights


@pytest.fixture
def directory(tmp_path):
    save_file({"w": np.arange(8, dtype=np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_published_files_verify(directory):
    weights = describe_weights(directory, 3)
    verify_weights(weights)
    assert (weights.version, len(weights.files)) == (3, 2)


def test_the_fingerprint_is_the_contents(directory):
    first = describe_weights(directory, 3)
    assert describe_weights(directory, 4).fingerprint == first.fingerprint
    save_file({"w": np.zeros(8, dtype=np.float32)}, directory / "model.safetensors")
    assert describe_weights(directory, 3).fingerprint != first.fingerprint


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (flip_a_bit, "weights_corrupt"),
        (lambda path: path.write_bytes(path.read_bytes()[:-4]), "weights_corrupt"),
        (lambda path: path.unlink(), "weights_missing"),
    ],
)
def test_damaged_files_are_named(directory, damage, code):
    weights = describe_weights(directory, 3)
    damage(directory / "model.safetensors")
    with pytest.raises(InvalidData, match=r"model\.safetensors") as refusal:
        verify_weights(weights)
    assert refusal.value.code == code


def test_a_directory_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidData, match="no .safetensors file"):
        describe_weights(tmp_path, 0)


def test_the_newest_announcement_holds_even_with_a_lower_number(directory, redis_client):
    feed = WeightFeed(redis_client, "run")
    assert feed.latest() is None
    assert feed.wait(None, 0.01) is None
    for version in (6, 7, 5):
        feed.announce(describe_weights(directory, version))
    last, weights = feed.wait(None, 1.0)
    assert weights.version == 5
    assert feed.wait(last, 0.01) is None


def test_waiting_ends_with_the_announcement(directory, redis_client):
    feed = WeightFeed(redis_client, "run")
    timer = threading.Timer(0.1, feed.announce, [describe_weights(directory, 1)])
    timer.start()
    _, weights = feed.wait(None, 5.0)
    assert weights.version == 1
