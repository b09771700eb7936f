import time

import pytest
from trivet.v1 import sample_pb2

from services.common.errors import InvalidData, Unavailable
from services.common.transport.dead_letters import DeadLetters
from services.common.transport.streams import RunStreams, Stream


def prompt(request: int) -> sample_pb2.Prompt:
    return sample_pb2.Prompt(group_id=f"g-{request}", request=request)


@pytest.fixture
def streams(redis_client, redis_config) -> RunStreams:
    return RunStreams(redis_client, "run", redis_config)


def test_entries_arrive_once_and_in_order(streams):
    producer, consumer = streams.prompts("producer"), streams.prompts("a")
    producer.add_all([prompt(0), prompt(1), prompt(2)])
    first, rest = consumer.read(1, 1.0), consumer.read(10, 1.0)
    assert [entry.message.request for entry in first + rest] == [0, 1, 2]
    assert consumer.read(10, 0.01) == []
    consumer.ack(entry.id for entry in first)
    assert (consumer.depth(), consumer.pending()) == (2, 2)


def test_a_dead_consumers_entry_is_claimed_by_another(streams):
    dead, alive = streams.prompts("dead"), streams.prompts("alive")
    dead.add(prompt(7))
    assert len(dead.read(1, 1.0)) == 1
    assert alive.read(1, 0.01) == []
    claimed, deadline = [], time.monotonic() + 10
    while not claimed:
        assert time.monotonic() < deadline
        claimed = alive.read(1, 0.05)
    (entry,) = claimed
    assert (entry.message.request, entry.deliveries) == (7, 2)


def test_a_touched_entry_is_not_claimed(streams):
    slow, other = streams.prompts("slow"), streams.prompts("other")
    slow.add(prompt(7))
    (entry,) = slow.read(1, 1.0)
    # Together longer than an entry may be idle.
    for _ in range(4):
        time.sleep(0.1)
        slow.touch([entry.id])
        assert other.read(1, 0.01) == []


def test_an_entry_that_keeps_failing_becomes_a_dead_letter(streams, redis_client):
    consumer = streams.prompts("a")
    consumer.add(prompt(7))
    deliveries = []
    deadline = time.monotonic() + 5
    while consumer.depth() and time.monotonic() < deadline:
        deliveries += [entry.deliveries for entry in consumer.read(1, 0.05)]
    assert deliveries == [1, 2]
    (letter,) = DeadLetters(redis_client, "run").read()
    assert (letter.code, letter.group_id, letter.stream) == ("too_many_deliveries", "g-7", "prompts")


def test_an_unparsable_entry_becomes_a_dead_letter_and_the_rest_arrives(streams, redis_client):
    consumer = streams.prompts("a")
    redis_client.xadd("run:prompts", {b"message": b"\xff\xff\xff"})
    redis_client.xadd("run:prompts", {b"other": b""})
    consumer.add(prompt(1))
    assert [entry.message.request for entry in consumer.read(10, 1.0)] == [1]
    assert [letter.code for letter in DeadLetters(redis_client, "run").read()] == ["entry_unparsable"] * 2


def test_forward_moves_the_entry_in_one_piece(streams):
    prompts, samples = streams.prompts("a"), streams.samples("a")
    prompts.add(prompt(3))
    (entry,) = prompts.read(1, 1.0)
    prompts.forward(entry.id, samples, sample_pb2.Group(prompt=entry.message))
    assert (prompts.depth(), prompts.pending(), samples.depth()) == (0, 0, 1)


def test_recover_returns_what_was_read_and_never_acknowledged(streams):
    trainer = streams.scored("trainer")
    for request in range(5):
        trainer.add(sample_pb2.ScoredGroup(group=sample_pb2.Group(prompt=prompt(request))))
    entries = trainer.read(3, 1.0)
    trainer.ack([entries[0].id])
    again = streams.scored("trainer")
    assert [entry.message.group.prompt.request for entry in again.recover()] == [1, 2]
    assert [entry.message.group.prompt.request for entry in again.read(5, 1.0)] == [3, 4]


def test_a_lost_consumer_group_is_made_again(streams, redis_client):
    consumer = streams.prompts("a")
    redis_client.delete("run:prompts")
    assert consumer.read(1, 0.01) == []
    consumer.add(prompt(1))
    assert len(consumer.read(1, 1.0)) == 1


def test_every_operation_outlives_a_lost_consumer_group(streams, redis_client):
    """As after FLUSHALL, while an entry is being worked on."""
    consumer, target = streams.prompts("a"), streams.samples("a")
    consumer.add_all([prompt(0), prompt(1), prompt(2)])
    first, second, third = consumer.read(3, 1.0)
    operations = {
        "touch": lambda: consumer.touch([first.id]),
        "pending": consumer.pending,
        "recover": lambda: list(consumer.recover()),
        "settle": lambda: consumer.settle([first.id]),
        "ack": lambda: consumer.ack([first.id]),
        "forward": lambda: consumer.forward(second.id, target, sample_pb2.Group(prompt=second.message)),
        "dead_letter": lambda: consumer.dead_letter(third, InvalidData("prompt_too_long", "9 tokens")),
    }
    for operation in operations.values():
        redis_client.delete("run:prompts")
        assert not operation()
    assert target.depth() == 1
    assert [letter.group_id for letter in DeadLetters(redis_client, "run").read()] == ["g-2"]
    assert consumer.read(1, 0.01) == []
    consumer.add(prompt(3))
    assert [entry.message.request for entry in consumer.read(1, 1.0)] == [3]


def test_dead_letters_repeat_until_marked(streams, redis_client):
    consumer = streams.prompts("a")
    consumer.add(prompt(1))
    (entry,) = consumer.read(1, 1.0)
    consumer.dead_letter(entry, InvalidData("prompt_too_long", "prompt has 9 tokens, at most 8 allowed"))
    letters = DeadLetters(redis_client, "run")
    assert len(letters.read()) == len(letters.read()) == 1
    letters.mark_read()
    assert letters.read() == []
    assert redis_client.xlen("run:dead") == 1


def test_scan_sees_read_and_unread_without_taking(streams):
    consumer = streams.prompts("a")
    consumer.add_all([prompt(request) for request in range(300)])
    consumer.read(10, 1.0)
    assert [message.request for message in consumer.scan()] == list(range(300))
    assert len(consumer.read(300, 1.0)) == 290


def test_a_refused_connection_is_retried_then_raised(redis_config):
    from services.common.transport.client import connect

    config = redis_config.model_copy(update={"url": "redis://127.0.0.1:1/0", "retry_seconds": 1.0})
    started = time.monotonic()
    with pytest.raises(Unavailable, match="Redis does not answer") as refusal:
        Stream(
            connect(config),
            "run:prompts",
            sample_pb2.Prompt,
            group="rollout",
            consumer="a",
            config=config,
            dead_letters=DeadLetters(None, "run"),
        )
    assert refusal.value.code == "redis_unreachable"
    assert time.monotonic() - started < 10


def test_only_the_entry_in_hand_counts_a_delivery_when_the_trainer_dies(streams, redis_client):
    """redis.max_deliveries is 2: the third start gives it up, and what lay before and behind it comes every time."""
    first = streams.scored("trainer")
    for request in range(3):
        first.add(sample_pb2.ScoredGroup(group=sample_pb2.Group(prompt=prompt(request))))
    first.read(3, 1.0)
    seen = []
    for _ in range(4):
        start = []
        for entry in streams.scored("trainer").recover():
            start.append(entry.message.group.prompt.request)
            if start[-1] == 1:
                break  # dies
        seen.append(start)
    assert seen == [[0, 1], [0, 2], [0, 2], [0, 2]]
    (letter,) = DeadLetters(redis_client, "run").read()
    assert (letter.code, letter.group_id, letter.deliveries) == ("too_many_deliveries", "g-1", 3)
