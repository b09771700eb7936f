import time

import pytest
from trivet.v1 import rollout_pb2, sample_pb2, weights_pb2

from services.common.errors import InvalidData
from services.common.transport import dead_letters
from services.common.transport.dead_letters import DeadLetters, dead_letter
from services.common.transport.rollout_registry import RolloutRegistry
from services.common.transport.streams import RunStreams
from services.common.transport.weight_feed import WeightFeed

GARBAGE = [{b"message": b"\xff\xff\xff"}, {b"other": b"1"}]
# A group_id that is not UTF-8: nobody can build it, and anybody can send it.
NOT_UTF8 = b"\x0a\x02\xff\xfe"


@pytest.mark.parametrize("fields", [*GARBAGE, {b"message": b"\x1a\x02\xff\xfe"}])
def test_a_letter_that_is_none_comes_as_a_letter_about_itself_once(redis_client, fields):
    letters = DeadLetters(redis_client, "run")
    letters.add(dead_letter("prompts", "1-0", b"", InvalidData("a", "b"), group_id="g1"))
    redis_client.xadd("run:dead", fields)
    letters.add(dead_letter("prompts", "2-0", b"", InvalidData("a", "b"), group_id="g2"))
    assert [(letter.stream, letter.code, letter.group_id) for letter in letters.read()] == [
        ("prompts", "a", "g1"),
        ("dead", "entry_unparsable", ""),
        ("prompts", "a", "g2"),
    ]
    letters.mark_read()
    assert letters.read() == []


@pytest.mark.parametrize("mark", [b"\xff\xff", b"", b"12", b"9" * 5000])
def test_a_mark_that_is_none_repeats_the_letters(redis_client, mark):
    letters = DeadLetters(redis_client, "run")
    letters.add(dead_letter("prompts", "1-0", b"", InvalidData("a", "b")))
    redis_client.set("run:dead:read", mark)
    assert len(letters.read()) == 1
    letters.mark_read()
    assert letters.read() == []


def test_what_is_given_up_does_not_fill_redis(monkeypatch):
    monkeypatch.setattr(dead_letters, "PAYLOAD_BYTES_KEPT", 4)
    letter = dead_letter("prompts", "1-0", b"12345", InvalidData("a", "x" * 1_000_000))
    assert letter.payload == b"1234"
    assert len(letter.reason) < 3_000
    assert letter.reason.startswith("xxx")
    assert "the first 4 of 5 bytes" in letter.reason


def test_a_reason_that_is_not_text_is_written(redis_client):
    letters = DeadLetters(redis_client, "run")
    letters.add(dead_letter("samples", "1-0", b"", InvalidData("a", "answer is '\ud800'")))
    assert [letter.reason for letter in letters.read()] == [r"answer is '\ud800'"]


@pytest.mark.parametrize("fields", [*GARBAGE, {b"message": NOT_UTF8}])
def test_every_stream_gives_up_what_it_cannot_parse_and_reads_on(redis_client, redis_config, fields):
    streams = RunStreams(redis_client, "run", redis_config)
    readers = [streams.prompts("a"), streams.samples("a"), streams.scored("a")]
    prompt = sample_pb2.Prompt(group_id="g")
    sound = [prompt, sample_pb2.Group(prompt=prompt)]
    sound.append(sample_pb2.ScoredGroup(group=sound[1]))
    for stream, message in zip(readers, sound, strict=True):
        redis_client.xadd(stream.name, fields)
        stream.add(message)
        assert list(stream.scan()) == [message]
        assert [entry.message for entry in stream.read(10, 1.0)] == [message]
    assert [letter.code for letter in DeadLetters(redis_client, "run").read()] == ["entry_unparsable"] * 3


@pytest.mark.parametrize("fields", [*GARBAGE, {b"message": b"\x12\x02\xff\xfe"}, {b"message": b""}])
def test_an_announcement_that_is_none_is_given_up_once(redis_client, fields):
    """An empty message is a version without a fingerprint."""
    feed, other = WeightFeed(redis_client, "run"), WeightFeed(redis_client, "run")
    redis_client.xadd("run:weights", fields)
    assert feed.wait(None, 0.01) is None
    version = weights_pb2.WeightVersion(version=1, fingerprint="f", path="/w")
    feed.announce(version)
    redis_client.xadd("run:weights", fields)
    redis_client.xadd("run:weights", fields)
    first = feed.latest()
    assert first is not None
    assert (first[1], other.latest(), other.latest_on_disk()) == (version, first, first)
    # A follower that has settled it is not woken again and again.
    started = time.monotonic()
    assert other.wait(first[0], 0.2) == first
    assert time.monotonic() - started > 0.15
    letters = DeadLetters(redis_client, "run").read()
    assert [letter.stream for letter in letters] == ["weights"] * 3


@pytest.mark.parametrize(
    ("member", "value"),
    [
        (b"bad", b"\xff\xff\xff"),
        (b"bad", b""),
        (b"\xff\xfe", b"\xff"),
        (b"bad", rollout_pb2.RegisteredRollout(rollout_id="good", address="a:1").SerializeToString()),
        (b"bad", rollout_pb2.RegisteredRollout(rollout_id="bad").SerializeToString()),
    ],
)
def test_a_registration_that_is_none_is_given_up_once(redis_client, member, value):
    registry = RolloutRegistry(redis_client, "run")
    registry.renew(rollout_pb2.RegisteredRollout(rollout_id="good", address="a:1"))
    redis_client.sadd("run:rollouts", member)
    redis_client.set(b"run:rollouts:" + member, value)
    for _ in range(2):
        assert [rollout.rollout_id for rollout in registry.alive()] == ["good"]
    assert [letter.stream for letter in DeadLetters(redis_client, "run").read()] == ["rollouts"]
    assert redis_client.smembers("run:rollouts") == {b"good"}
