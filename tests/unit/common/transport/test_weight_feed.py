import threading

import numpy as np
import pytest
from safetensors.numpy import save_file

from services.common.errors import InvalidData
from services.common.transport.weight_feed import WeightFeed, check_location, describe_weights, verify_weights


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


@pytest.fixture
def published(tmp_path):
    """Weights of a run, and a directory of the same content outside."""
    for name in ("run/weights/v1", "outside"):
        (tmp_path / name).mkdir(parents=True)
        save_file({"w": np.zeros(2, dtype=np.float32)}, tmp_path / name / "model.safetensors")
    return tmp_path


def test_published_weights_are_in_their_place_also_through_a_linked_mount(published):
    (published / "mount").symlink_to(published / "run")
    for path in ("run/weights/v1", "mount/weights/v1", "run/../run/weights/v1"):
        check_location(describe_weights(published / path, 1), published / "run/weights")
        check_location(describe_weights(published / path, 1), published / "mount/weights")


def link_of_a_directory(published, weights):
    (published / "run/weights/v2").symlink_to(published / "outside")
    weights.path = str(published / "run/weights/v2")


def link_of_a_file(published, weights):
    (published / "run/weights/v1/config.json").symlink_to(published / "outside/model.safetensors")
    weights.files.add(name="config.json")


def loop_of_links(published, weights):
    (published / "run/weights/v2").symlink_to(published / "run/weights/v2")
    weights.path = str(published / "run/weights/v2")


@pytest.mark.parametrize(
    "change",
    [
        link_of_a_directory,
        link_of_a_file,
        loop_of_links,
        lambda published, weights: setattr(weights, "path", str(published / "outside")),
        lambda published, weights: setattr(weights, "path", str(published / "run/weights/../../outside")),
        lambda published, weights: setattr(weights, "path", str(published / "run/weights")),
        lambda published, weights: setattr(weights, "path", "a\0b"),
        lambda published, weights: weights.files.add(name="../../../outside/model.safetensors"),
        lambda published, weights: weights.files.add(name=str(published / "outside/model.safetensors")),
        lambda published, weights: weights.files.add(name=""),
    ],
)
def test_what_lies_elsewhere_is_refused_whether_or_not_it_exists(published, change):
    weights = describe_weights(published / "run/weights/v1", 1)
    change(published, weights)
    with pytest.raises(InvalidData, match="weights.path is .* expected a directory below .*run/weights") as refusal:
        check_location(weights, published / "run/weights")
    assert refusal.value.code == "weights_outside"


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
    assert feed.wait(last, 0.01) == (last, weights)


def test_waiting_ends_with_the_announcement(directory, redis_client):
    feed = WeightFeed(redis_client, "run")
    timer = threading.Timer(0.1, feed.announce, [describe_weights(directory, 1)])
    timer.start()
    _, weights = feed.wait(None, 5.0)
    assert weights.version == 1
