"""What rank 0 takes, refuses and lets go of, over a real Redis; the test plays rollout and reward."""

import numpy as np
import pytest
from trivet.v1 import sample_pb2, step_pb2

from services.common.errors import GaveUp, InvalidData, Outage, Unavailable
from services.common.transport.streams import Entry
from services.common.wire.replay_data import CandidateSets, Replay, encode_replay
from services.trainer.batch import groups
from services.trainer.batch.groups import batch_samples, decode_group
from services.trainer.steps import intake
from services.trainer.steps.evaluation import Evaluation
from tests.support.trainer.orchestration import (
    FACTS,
    GROUPS,
    SIZE,
    dead_letters,
    nan_logprob,
    orchestrator,
    state,
    trained,
    until_training,
)


def test_entries_and_blobs_stay_until_a_checkpoint_holds_them(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.issue()
    play.answer()
    until_training(made)
    assert play.scored.depth() == 2 * GROUPS
    assert len(redis_client.keys("run:blob:*")) == 2 * GROUPS * SIZE
    made.intake.commit()
    assert play.scored.depth() == GROUPS
    assert len(redis_client.keys("run:blob:*")) == GROUPS * SIZE


def test_a_checkpoint_takes_the_blobs_that_a_dead_rollout_left_behind(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.issue()
    for entry in play.read():
        # Put by a rollout that died before it handed on its samples; another drew them again.
        play.blobs.put(f"{entry.message.group_id}/0/0", b"of the dead")
        play.prompts.forward(entry.id, play.scored, play.group(entry.message))
    until_training(made)
    made.intake.commit()
    left = {key.decode().rpartition("/")[0] for key in redis_client.keys("run:blob:*")}
    assert left == {f"run:blob:{made.history}-{request}/0" for request in made.ledger.outstanding}
    assert len(left) == GROUPS


def test_a_group_that_comes_twice_counts_once(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.issue()
    entries = play.read()
    for entry in entries:
        play.scored.add(play.group(entry.message))
        play.scored.add(play.group(entry.message))
    assert trained(until_training(made)) == [0, 1]
    assert trained(until_training(made)) == [2, 3]
    assert made.ledger.trained == 4


def test_what_an_earlier_history_of_the_name_left_is_dropped(config, redis_client, play):
    earlier = orchestrator(config, redis_client)
    earlier.issue()
    refused, *others = play.read()
    play.prompts.dead_letter(refused, InvalidData("prompt_too_long", "prompt has 9 tokens, at most 8 allowed"))
    assert play.answer(entries=others) == [1, 2, 3]
    made = orchestrator(config, redis_client)
    made.issue()
    assert made.next_order().message.action == step_pb2.STEP_ACTION_WAIT
    assert (made.ledger.lost, made.intake.ready, play.scored.depth()) == (set(), 0, 0)
    made.intake.commit()
    assert redis_client.keys("run:blob:*") == []
    play.answer()
    assert trained(until_training(made)) == [0, 1]


def test_a_missing_blob_is_issued_again(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.issue()
    groups = []
    play.answer(groups.append)
    redis_client.delete(groups[0].group.samples[1].replay.key)
    assert trained(until_training(made)) == [1, 2]
    (again,) = play.read()
    assert (again.message.request, again.message.attempt) == (0, 1)
    play.scored.add(play.group(again.message))
    assert trained(until_training(made)) == [3, 0]


def test_a_corrupt_blob_is_issued_again(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.issue()
    groups = []
    play.answer(groups.append)
    redis_client.set(groups[0].group.samples[0].replay.key, b"rotten")
    assert trained(until_training(made)) == [1, 2]
    assert [entry.message.request for entry in play.read()] == [0]


def missing_logprob(scored):
    del scored.group.samples[0].logprobs[:]


def infinite_reward(scored):
    scored.scores[0].reward = float("inf")


def missing_sample(scored):
    del scored.group.samples[0]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (nan_logprob, "logprob_not_finite"),
        (missing_logprob, "logprobs_rows"),
        (infinite_reward, "reward_not_finite"),
        (missing_sample, "group_size"),
    ],
)
def test_a_bad_group_is_dead_lettered_by_name_and_replaced(config, redis_client, play, change, code):
    made = orchestrator(config, redis_client)
    made.issue()
    play.answer(lambda scored: change(scored) if scored.group.prompt.request == 1 else None)
    assert trained(until_training(made)) == [0, 2]
    letter, *_ = dead_letters(redis_client)
    assert (letter.code, letter.group_id) == (code, f"{made.history}-1")
    made.step += 1
    made.issue()
    assert made.ledger.lost == {1}
    assert play.answer() == [4, 5, 6]


def test_a_replay_that_the_model_refuses_is_dead_lettered(config, redis_client, play):
    def other_rows(scored):
        sample = scored.group.samples[0]
        replay = Replay(candidates=CandidateSets(np.array([1], np.int32), np.array([1], np.int32)))
        sample.replay.CopyFrom(play.blobs.put(sample.sample_id, encode_replay(sample.sample_id, replay)))

    made = orchestrator(config, redis_client)
    made.issue()
    play.answer(lambda scored: other_rows(scored) if scored.group.prompt.request == 0 else None)
    assert trained(until_training(made)) == [1, 2]
    assert [letter.code for letter in dead_letters(redis_client)] == ["candidates_rows"]


def test_a_group_is_decoded_once_and_kept_for_its_step(config, redis_client, play, monkeypatch):
    decoded = []

    def counted(scored, *arguments):
        decoded.append(scored.group.prompt.request)
        return decode_group(scored, *arguments)

    monkeypatch.setattr(groups, "decode_group", counted)
    monkeypatch.setattr(intake, "decode_group", counted)
    made = orchestrator(config, redis_client)
    made.issue()
    play.answer()
    while not (order := made.next_order()).samples:
        assert len(decoded) <= 4
    samples = batch_samples(order.message, config, FACTS, order.samples)
    assert decoded == [0, 1, 2, 3]
    assert [sample.token_ids is kept.token_ids for sample, kept in zip(samples, order.samples, strict=True)] == [
        True
    ] * (GROUPS * SIZE)
    # Another rank decodes what it is sent, to the same samples.
    other = batch_samples(step_pb2.StepOrder.FromString(order.message.SerializeToString()), config, FACTS)
    assert [as_lists(sample) for sample in other] == [as_lists(sample) for sample in samples]
    assert [sample.advantage for sample in samples] == [-0.5, 0.5] * GROUPS


def as_lists(sample):
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(sample).items()}


def test_a_rollouts_dead_letter_makes_room_for_another_prompt(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.issue()
    refused, *others = play.read()
    play.prompts.dead_letter(refused, InvalidData("prompt_too_long", "prompt has 9 tokens, at most 8 allowed"))
    made.next_order()
    assert made.ledger.lost == {0}
    made.issue()
    assert play.answer(entries=others) == [1, 2, 3]
    assert play.answer() == [4]


def test_too_many_lost_groups_in_a_row_end_the_run_with_the_reason(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.issue()
    for entry in play.read():
        play.prompts.dead_letter(entry, Unavailable("scorer_timeout", "stuck"))
    with pytest.raises(GaveUp, match="scorer_timeout: stuck") as failure:
        made.next_order()
    assert failure.value.code == "too_many_lost_groups"


def test_the_oldest_are_trained_first(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.issue()
    entries = play.read()
    made.step = 1
    for entry, version in zip(entries, (1, 0, 1, 0), strict=True):
        scored = play.group(entry.message)
        for sample in scored.group.samples:
            sample.versions[0].version = version
        play.prompts.forward(entry.id, play.scored, scored)
    assert trained(until_training(made)) == [1, 3]


def same_reward(scored):
    for score in scored.scores:
        score.reward = 1.0


def test_dynamic_sampling_replaces_groups_without_variance_within_its_bound(config, redis_client, play):
    bounded = orchestrator(config, redis_client, filtered_rounds=1)
    bounded.issue()
    assert play.answer(same_reward) == [0, 1, 2, 3]
    # As many as one step takes are replaced, the rest is trained on.
    assert trained(until_training(bounded)) == [2, 3]
    assert bounded.ledger.lost == {0, 1}
    bounded.intake.commit()
    assert redis_client.keys("run:blob:*") == []
    bounded.step += 1
    bounded.issue()
    assert bounded.ledger.cursor == 2 + 3 * GROUPS
    assert play.answer() == list(range(4, 8))
    assert trained(until_training(bounded)) == [4, 5]


def test_garbage_among_the_dead_letters_costs_nothing(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.issue()
    redis_client.xadd("run:dead", {"message": b"\xff\xff\xff"})
    redis_client.xadd("run:dead", {"other": b""})
    play.answer()
    assert trained(until_training(made)) == [0, 1]
    assert made.ledger.lost == set()


@pytest.mark.parametrize("number", ["9" * 5000, "01", "\u0663", "-1", "1_0", ""])
def test_a_group_id_that_is_no_issue_is_of_another_history(config, redis_client, play, number):
    made = orchestrator(config, redis_client)
    made.issue()
    play.scored.add(play.group(sample_pb2.Prompt(group_id=f"{made.history}-{number}", group_size=1)))
    play.prompts.dead_letter(
        Entry("1-1", sample_pb2.Prompt(group_id=f"{made.history}-{number}"), 1), InvalidData("a", "b")
    )
    play.answer()
    assert trained(until_training(made)) == [0, 1]
    assert made.ledger.lost == set()


class Died(BaseException):
    """The process, not the code."""


def fails_on(monkeypatch, request, error):
    def decode(scored, *arguments):
        if scored.group.prompt.request == request:
            raise error
        return decode_group(scored, *arguments)

    monkeypatch.setattr(intake, "decode_group", decode)


@pytest.mark.parametrize("error", [ValueError("maximum supported dimension is 64"), OverflowError("too large")])
def test_whatever_a_check_raises_is_the_groups_fault(config, redis_client, play, error, monkeypatch):
    fails_on(monkeypatch, 1, error)
    made = orchestrator(config, redis_client)
    made.issue()
    play.answer()
    assert trained(until_training(made)) == [0, 2]
    assert [letter.code for letter in dead_letters(redis_client)] == ["entry_unusable"]


def test_a_group_that_kills_the_trainer_is_given_up_and_the_others_are_not(config, redis_client, play, monkeypatch):
    fails_on(monkeypatch, 1, Died())
    made = orchestrator(config, redis_client)
    made.issue()
    play.answer()
    saved = state(made)
    with pytest.raises(Died):
        made.next_order()
    # It was read once, and redis.max_deliveries is 2.
    with pytest.raises(Died):
        orchestrator(config, redis_client).restore(saved)
    made = orchestrator(config, redis_client)
    made.restore(saved)
    assert trained(until_training(made)) == [0, 2]
    assert made.ledger.lost == {1}


def refuse_first(made, play):
    refused, *_ = play.read()
    play.prompts.dead_letter(refused, InvalidData("prompt_too_long", "prompt has 9 tokens, at most 8 allowed"))
    return made


def attempts(play, request):
    return [prompt.attempt for prompt in play.prompts.scan() if prompt.request == request]


def test_a_letter_that_is_read_again_changes_nothing(config, redis_client, play, monkeypatch):
    """As when Redis takes no mark because it is full, or the trainer dies before it marks what it has read."""
    made = orchestrator(config, redis_client)
    made.issue()
    saved = state(made)
    refuse_first(made, play)
    again = orchestrator(config, redis_client)
    with monkeypatch.context() as unmarked:
        unmarked.setattr(again.intake._dead_letters, "mark_read", lambda: None)
        # The configuration may have changed since it was issued, so that it is issued once more.
        again.restore(saved)
        for _ in range(2):
            again.intake.read_dead_letters()
        assert (again.ledger.outstanding[0], again.ledger.lost) == (1, set())
        saved = state(again)
    third = orchestrator(config, redis_client)
    third.restore(saved)
    third.intake.read_dead_letters()
    assert (third.ledger.outstanding[0], third.ledger.lost, attempts(play, 0)) == (1, set(), [1])


def test_a_letter_about_an_attempt_that_was_replaced_fails_no_evaluation():
    prompt = sample_pb2.Prompt(group_id="e")
    evaluation = Evaluation("e", 1.0, {"e": prompt}, lambda _: None)
    evaluation.issue_again("e")
    evaluation.fail("e", "scorer_timeout", "stuck", attempt=0)
    assert evaluation.missing == {"e"}
    evaluation.fail("e", "scorer_timeout", "stuck", attempt=1)
    assert evaluation.failures == {"e": ("scorer_timeout", "stuck")}


def test_a_refused_group_that_stays_in_the_stream_is_issued_again_once(config, redis_client, play, monkeypatch):
    """As when the trainer cannot acknowledge it."""
    made = orchestrator(config, redis_client)
    made.issue()
    groups = []
    play.answer(groups.append)
    redis_client.set(groups[0].group.samples[0].replay.key, b"rotten")
    ack = made.intake._stream.ack
    unacknowledged = [Outage("redis_loading", "loading")] * 2

    def sometimes(ids):
        if unacknowledged:
            raise unacknowledged.pop()
        ack(ids)

    monkeypatch.setattr(made.intake._stream, "ack", sometimes)
    until_training(made)
    assert (made.ledger.outstanding[0], attempts(play, 0)) == (1, [1])
