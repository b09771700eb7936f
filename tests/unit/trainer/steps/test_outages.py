"""Rank 0 while Redis or the blob store cannot serve: it waits, and loses nothing."""

import pytest
from trivet.v1 import step_pb2, trainer_pb2

from services.common.errors import Outage
from tests.support.trainer.orchestration import GROUPS, nan_logprob, orchestrator, state, trained, until_training


@pytest.fixture
def full_redis(redis_client):
    redis_client.config_set("maxmemory", 1)
    yield redis_client
    redis_client.config_set("maxmemory", 0)


def test_a_full_redis_is_waited_for(config, redis_client, play, request):
    made = orchestrator(config, redis_client)
    request.getfixturevalue("full_redis")
    for _ in range(2):
        made.issue()
        assert made.next_order().message.action == step_pb2.STEP_ACTION_WAIT
    assert (made.ledger.cursor, made.ledger.outstanding) == (0, {})
    made.status.state = trainer_pb2.TRAINER_STATE_WAITING
    assert "maxmemory" in made.status.not_ready
    redis_client.config_set("maxmemory", 0)
    made.next_order()
    assert play.answer() == [0, 1, 2, 3]
    assert trained(until_training(made)) == [0, 1]
    assert made.status.not_ready is None


def test_a_full_redis_while_a_group_is_refused_loses_neither_the_group_nor_its_letter(
    config, redis_client, play, request
):
    made = orchestrator(config, redis_client)
    made.issue()
    play.answer(lambda scored: nan_logprob(scored) if scored.group.prompt.request == 0 else None)
    request.getfixturevalue("full_redis")
    assert made.next_order().message.action == step_pb2.STEP_ACTION_WAIT
    assert made.next_order().message.action == step_pb2.STEP_ACTION_WAIT
    redis_client.config_set("maxmemory", 0)
    assert trained(until_training(made)) == [1, 2]
    assert redis_client.xlen("run:dead") == 1


def test_a_blob_store_that_is_down_costs_no_group(config, redis_client, play, monkeypatch):
    made = orchestrator(config, redis_client)
    made.issue()
    play.answer()
    get, down = made.intake._blobs.get, [True]

    def unreliable(blob):
        if down:
            raise Outage("blob_store", "connection refused")
        return get(blob)

    monkeypatch.setattr(made.intake._blobs, "get", unreliable)
    for _ in range(3):
        assert made.next_order().message.action == step_pb2.STEP_ACTION_WAIT
    down.clear()
    assert trained(until_training(made)) == [0, 1]
    assert trained(until_training(made)) == [2, 3]
    # Only fresh prompts have been issued meanwhile.
    assert [(entry.message.request, entry.message.attempt) for entry in play.read()] == [(4, 0), (5, 0)]
    assert redis_client.xlen("run:dead") == 0


def fail(error):
    raise error


def test_a_blob_store_that_is_down_at_the_start_costs_no_group(config, redis_client, play, monkeypatch):
    made = orchestrator(config, redis_client)
    made.issue()
    play.answer()
    saved = state(made)
    until_training(made)
    again = orchestrator(config, redis_client)
    get, failures = again.intake._blobs.get, [Outage("blob_store", "connection refused")] * 3
    monkeypatch.setattr(again.intake._blobs, "get", lambda blob: get(blob) if not failures else fail(failures.pop()))
    again.restore(saved)
    assert trained(until_training(again)) == [0, 1]
    assert trained(until_training(again)) == [2, 3]
    # Only fresh prompts have been issued meanwhile.
    assert [(entry.message.request, entry.message.attempt) for entry in play.read()] == [(4, 0), (5, 0)]


def prompts_issued(play):
    return sorted((prompt.request, prompt.attempt) for prompt in play.prompts.scan())


def test_a_full_redis_costs_no_group_that_was_refused_under_a_new_configuration(config, redis_client, play, request):
    made = orchestrator(config, redis_client)
    made.issue()
    play.answer()
    reward = config.reward.model_copy(update={"minimum": 0.5, "maximum": 2.0})
    again = orchestrator(config.model_copy(update={"reward": reward}), redis_client)
    again.restore(state(made))
    request.getfixturevalue("full_redis")
    for _ in range(2):
        assert again.next_order().message.action == step_pb2.STEP_ACTION_WAIT
    redis_client.config_set("maxmemory", 0)
    again.next_order()
    assert again.ledger.lost == set()
    assert prompts_issued(play) == [(n, 1) for n in range(2 * GROUPS)]


def test_a_full_redis_costs_no_group_that_became_too_stale(config, redis_client, play, request):
    made = orchestrator(config, redis_client)
    made.issue()
    play.answer()
    made.next_order()
    held = made.intake.held_requests()
    made.step = 2
    request.getfixturevalue("full_redis")
    for _ in range(2):
        assert made.next_order().message.action == step_pb2.STEP_ACTION_WAIT
    assert made.intake.held_requests() == held == set(range(2 * GROUPS))
    redis_client.config_set("maxmemory", 0)
    made.next_order()
    assert made.intake.held_requests() == set()
    assert prompts_issued(play) == [(n, 1) for n in held]
