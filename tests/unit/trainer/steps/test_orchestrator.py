"""Rank 0 against a real Redis; the test plays rollout and reward."""

import time

import pytest
from trivet.v1 import sample_pb2, step_pb2, trainer_pb2, weights_pb2

from services.common.errors import GaveUp, InvalidData, Outage, TrivetError, Unavailable
from services.common.transport.blobs import Blob
from services.common.transport.streams import Entry
from services.trainer.metrics import counters
from services.trainer.steps.evaluation import Evaluation
from services.trainer.steps.orchestrator import Orchestrator
from tests.support.orchestration import GROUPS, SIZE, orchestrator, state, trained, until_training


def test_issues_within_the_bound_and_trains_each_group_once(config, redis_client, play):
    made = orchestrator(config, redis_client)
    seen = []
    for _ in range(3):
        made.issue()
        play.answer()
        order = until_training(made)
        assert order.action == step_pb2.STEP_ACTION_TRAIN
        assert list(order.replay) == [b"replay"] * GROUPS * SIZE
        seen += trained(order)
        made.step += 1
        assert made.ledger.cursor <= (made.step + 1 + 1) * GROUPS
    assert seen == list(range(3 * GROUPS))


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


def test_after_a_crash_the_same_groups_are_trained_from_the_checkpoint_on(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.issue()
    play.answer()
    saved = state(made)
    first = trained(until_training(made))
    again = orchestrator(config, redis_client)
    again.restore(saved)
    assert trained(until_training(again)) == first
    assert again.ledger.cursor == 2 * GROUPS


def test_an_older_checkpoint_has_sampled_again_what_was_acknowledged_since(config, redis_client, play):
    made = orchestrator(config, redis_client)
    older = state(made)
    before = []
    for _ in range(3):
        made.issue()
        play.answer()
        before += trained(until_training(made))
        made.step += 1
        made.intake.commit()
    made.issue()
    again = orchestrator(config, redis_client)
    again.restore(older)
    seen = []
    while again.step < config.trainer.steps:
        again.issue()
        play.answer()
        seen += trained(until_training(again))
        again.step += 1
        again.intake.commit()
    assert sorted(seen) == list(range(config.trainer.steps * GROUPS))
    assert play.scored.depth() == play.prompts.depth() == 0


def test_what_is_nowhere_after_a_crash_is_issued_again_and_what_is_somewhere_is_not(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.issue()
    lost, *held = play.read()
    play.prompts.ack([lost.id])
    play.prompts.forward(held[0].id, play.samples, sample_pb2.Group(prompt=held[0].message))
    again = orchestrator(config, redis_client)
    again.restore(state(made))
    (entry,) = play.read()
    assert (entry.message.request, entry.message.attempt) == (lost.message.request, 1)


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
    refused, *_ = play.read()
    play.prompts.dead_letter(refused, InvalidData("prompt_too_long", "prompt has 9 tokens, at most 8 allowed"))
    time.sleep(0.3)
    assert play.answer() == [1, 2, 3]
    made = orchestrator(config, redis_client)
    made.issue()
    assert made.next_order().action == step_pb2.STEP_ACTION_WAIT
    assert (made.ledger.lost, made.intake.ready, play.scored.depth()) == (set(), 0, 0)
    assert redis_client.keys("run:blob:*") == []
    play.answer()
    assert trained(until_training(made)) == [0, 1]


def test_a_missing_blob_is_issued_again(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.issue()
    groups = []
    play.answer(groups.append)
    play.blobs.delete([Blob(groups[0].group.samples[1].sample_id, groups[0].group.samples[1].replay)])
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


def nan_logprob(scored):
    scored.group.samples[0].logprobs[0] = float("nan")


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
    (_, fields), *_ = redis_client.xrange("run:dead")
    letter = sample_pb2.DeadLetter.FromString(fields[b"message"])
    assert (letter.code, letter.group_id) == (code, f"{made.history}-1")
    made.step += 1
    made.issue()
    assert made.ledger.lost == {1}
    assert play.answer() == [4, 5, 6]


def test_a_replay_that_the_model_refuses_is_dead_lettered(config, redis_client, play):
    def check(arrival):
        if arrival.request == 0:
            raise InvalidData("routing_rows", "replay.routing has 1 rows, expected 2")

    made = orchestrator(config, redis_client, check)
    made.issue()
    play.answer()
    assert trained(until_training(made)) == [1, 2]


def test_a_rollouts_dead_letter_makes_room_for_another_prompt(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.issue()
    refused, *_ = play.read()
    play.prompts.dead_letter(refused, InvalidData("prompt_too_long", "prompt has 9 tokens, at most 8 allowed"))
    made.next_order()
    assert made.ledger.lost == {0}
    made.issue()
    assert play.answer() == [1, 2, 3]
    assert play.answer() == [4]


def test_too_many_lost_groups_in_a_row_end_the_run_with_the_reason(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.issue()
    for entry in play.read():
        play.prompts.dead_letter(entry, Unavailable("scorer_timeout", "stuck"))
    with pytest.raises(GaveUp, match="scorer_timeout: stuck") as failure:
        made.next_order()
    assert failure.value.code == "too_many_lost_groups"


def test_an_evaluation_waits_for_its_own_results(config, redis_client, play):
    from concurrent.futures import ThreadPoolExecutor

    made = orchestrator(config, redis_client)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(made.evaluate)
        answered: list[int] = []
        deadline = time.monotonic() + 5
        while not waiting.done() and time.monotonic() < deadline:
            answered += play.answer()
        values = waiting.result(1)
    assert len(answered) == 4
    # Rewards are the indices: the greedy one fails, and one of two sampled ones succeeds.
    assert (values["greedy_accuracy"], values["sampled_accuracy"]) == (0.0, 0.5)
    assert play.scored.depth() == 0


@pytest.mark.parametrize("abandoned", [2, 9])
def test_an_evaluation_is_not_of_weights_that_the_run_has_gone_back_from(config, redis_client, play, abandoned):
    """Rollouts may still be on version 40 when the run starts again from its checkpoint of step 20."""
    from concurrent.futures import ThreadPoolExecutor

    impatient = config.evaluation.model_copy(update={"timeout_seconds": 2.0})
    made = orchestrator(config.model_copy(update={"evaluation": impatient}), redis_client)
    made.step = 20
    seen = []

    def under_old_weights(scored):
        prompt = scored.group.prompt
        seen.append(prompt.attempt)
        ahead = prompt.attempt < abandoned
        for sample, score in zip(scored.group.samples, scored.scores, strict=True):
            sample.versions[0].version = 40 if ahead else 20
            score.reward = score.raw_reward = float(not ahead)

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(made.evaluate)
        deadline = time.monotonic() + 15
        while not waiting.done() and time.monotonic() < deadline:
            play.answer(under_old_weights)
        if abandoned == 9:
            # It never stops: after some tries the groups stay missing.
            with pytest.raises(Unavailable, match="4 of 4 evaluation groups are missing"):
                waiting.result(1)
            assert max(seen) == 3
        else:
            assert waiting.result(1)["greedy_accuracy"] == 1.0
            assert sorted(seen) == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]


def test_an_evaluation_that_does_not_come_back_is_an_error(config, redis_client):
    impatient = config.evaluation.model_copy(update={"timeout_seconds": 0.1})
    made = orchestrator(config.model_copy(update={"evaluation": impatient}), redis_client)
    with pytest.raises(Unavailable, match="4 of 4 evaluation groups"):
        made.evaluate()


def test_an_evaluation_of_which_every_group_fails_is_not_tried_again_by_a_restart(config, redis_client, play):
    from concurrent.futures import ThreadPoolExecutor

    made = orchestrator(config, redis_client)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(made.evaluate)
        deadline = time.monotonic() + 5
        while not waiting.done() and time.monotonic() < deadline:
            for entry in play.read():
                play.prompts.dead_letter(entry, TrivetError("scorer_metadata", "metadata.answer is missing"))
        with pytest.raises(
            GaveUp, match=r"all 4 groups .* \(4 × scorer_metadata\); the first because .*answer is missing"
        ):
            waiting.result(1)


def test_an_evaluation_may_take_long_while_results_come(config, redis_client, play, monkeypatch):
    patient = config.evaluation.model_copy(update={"timeout_seconds": 10.0})
    made = orchestrator(config.model_copy(update={"evaluation": patient}), redis_client)
    now = 0.0
    waiting = None

    def one_more(_: float) -> int:
        nonlocal now, waiting
        now += 6.0
        waiting = waiting or play.read()
        made.intake.evaluation.add(play.group(waiting.pop().message))
        return 1

    monkeypatch.setattr("services.trainer.steps.orchestrator.time.monotonic", lambda: now)
    monkeypatch.setattr(made.intake, "poll", one_more)
    assert made.evaluate()["sampled_accuracy"] == 0.5
    assert now == 24.0


def test_stop_and_save_come_before_training(config, redis_client):
    made = orchestrator(config, redis_client)
    made.controls.request_save()
    assert made.next_order().action == step_pb2.STEP_ACTION_SAVE
    made.controls.stop.set()
    assert made.next_order().action == step_pb2.STEP_ACTION_STOP


def test_a_paused_trainer_holds(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.issue()
    play.answer()
    made.controls.pause()
    assert made.next_order().action == step_pb2.STEP_ACTION_WAIT
    made.controls.resume()
    assert until_training(made).action == step_pb2.STEP_ACTION_TRAIN


def test_the_run_issues_no_more_than_it_needs(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.step = 9
    made.issue()
    assert made.ledger.cursor == GROUPS


def resized(config, **trainer):
    changed = config.trainer.model_copy(update=trainer)
    return config.model_copy(update={"trainer": changed})


@pytest.mark.parametrize(("groups", "staleness"), [(1, 1), (1, 0), (2, 0), (3, 1), (8, 2)])
def test_a_run_goes_on_with_steps_of_another_size(config, redis_client, play, groups, staleness):
    made = orchestrator(config, redis_client)
    made.issue()
    play.answer()
    seen = trained(until_training(made))
    made.step += 1
    made.issue()
    made.intake.commit()
    again = orchestrator(resized(config, groups_per_step=groups, max_staleness=staleness, steps=5), redis_client)
    again.restore(state(made, step=1))
    while again.step < 5:
        again.issue()
        assert len(again.ledger.outstanding) <= (1 + staleness) * groups
        play.answer()
        order = until_training(again)
        assert all(again.step - scored.group.prompt.min_version <= staleness for scored in order.groups)
        seen += trained(order)
        again.step += 1
        again.issue()
    assert len(seen) == len(set(seen)) == GROUPS + 4 * groups == again.ledger.trained
    assert not again.ledger.outstanding


def test_a_group_that_is_too_stale_is_sampled_again(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.step = 5
    made.issue()
    first, second, *_ = play.read()
    for entry, version in ((first, 3), (second, 4)):
        scored = play.group(entry.message)
        scored.group.samples[1].versions[0].version = version
        play.prompts.forward(entry.id, play.scored, scored)
    made.next_order()
    # Version 3 came too late, version 4 just in time; one step later it has grown too stale as well.
    assert made.intake.held_requests() == {second.message.request}
    made.step = 6
    made.next_order()
    assert made.intake.held_requests() == set()
    again = [prompt for prompt in play.prompts.scan() if prompt.attempt == 1]
    assert [(prompt.request, prompt.min_version) for prompt in again] == [(0, 5), (1, 6)]


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


def test_nothing_coming_back_is_an_error_that_names_the_backlog(config, redis_client):
    impatient = config.trainer.model_copy(update={"batch_timeout_seconds": 0.5})
    made = orchestrator(config.model_copy(update={"trainer": impatient}), redis_client)
    # A long step before is no silence.
    time.sleep(0.6)
    with pytest.raises(Unavailable, match="entries waiting: prompts 4, samples 0, scored 0"):
        made.next_order()


def test_what_vanished_is_found_missing_while_waiting(config, redis_client, play, monkeypatch):
    monkeypatch.setattr("services.trainer.steps.orchestrator.RECONCILE_SECONDS", 0.0)
    made = orchestrator(config, redis_client)
    made.issue()
    redis_client.delete("run:prompts")
    made.next_order()
    assert sorted((entry.message.request, entry.message.attempt) for entry in play.read()) == [(n, 1) for n in range(4)]


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
    assert len(redis_client.keys("run:blob:*")) == 2 * SIZE
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


@pytest.mark.parametrize("error", [ValueError("maximum supported dimension is 64"), OverflowError("too large")])
def test_whatever_a_check_raises_is_the_groups_fault(config, redis_client, play, error):
    def check(arrival):
        if arrival.request == 1:
            raise error

    made = orchestrator(config, redis_client, check)
    made.issue()
    play.answer()
    assert trained(until_training(made)) == [0, 2]
    (_, fields), *_ = redis_client.xrange("run:dead")
    assert sample_pb2.DeadLetter.FromString(fields[b"message"]).code == "entry_unusable"


def test_a_group_that_kills_the_trainer_is_given_up_and_the_others_are_not(config, redis_client, play):
    def check(arrival):
        if arrival.request == 1:
            raise Died

    made = orchestrator(config, redis_client, check)
    made.issue()
    play.answer()
    saved = state(made)
    with pytest.raises(Died):
        made.next_order()
    # It was read once, and redis.max_deliveries is 2.
    with pytest.raises(Died):
        orchestrator(config, redis_client, check).restore(saved)
    made = orchestrator(config, redis_client, check)
    made.restore(saved)
    assert trained(until_training(made)) == [0, 2]
    assert made.ledger.lost == {1}


def announced(made: Orchestrator) -> list[int]:
    return [
        weights_pb2.WeightVersion.FromString(fields[b"message"]).version
        for _, fields in made.client.xrange("run:weights")
    ]


@pytest.mark.parametrize("lost", [lambda client: client.delete("run:weights"), lambda client: client.flushdb()])
def test_a_version_that_redis_lost_is_announced_again(config, redis_client, lost):
    made = orchestrator(config, redis_client)
    made.feed.announce(weights_pb2.WeightVersion(version=14, fingerprint="f", path="/w"))
    made.next_order()
    assert announced(made) == [14]
    lost(redis_client)
    made.next_order()
    assert announced(made) == [14]


def test_a_redis_that_went_back_hears_of_the_version_again(config, redis_client):
    made = orchestrator(config, redis_client)
    for version in (3, 14):
        made.feed.announce(weights_pb2.WeightVersion(version=version, fingerprint=f"f{version}", path="/w"))
    newest, _ = made.feed.latest()
    redis_client.xdel("run:weights", newest)
    made.next_order()
    assert announced(made) == [3, 14]


def test_a_step_does_not_leave_behind_what_would_be_too_stale_for_the_next(config, redis_client, play):
    """max_staleness is 1: what was issued at version 0 is trained at step 1 at the latest."""
    made = orchestrator(config, redis_client)
    made.issue()
    first, *others = play.read()
    for entry in others:
        play.scored.add(play.group(entry.message))
    assert trained(until_training(made)) == [1, 2]
    made.step += 1
    made.issue()
    for entry in play.read():
        play.scored.add(play.group(entry.message))
    for _ in range(2):
        assert made.next_order().action == step_pb2.STEP_ACTION_WAIT
    play.scored.add(play.group(first.message))
    assert trained(until_training(made)) == [3, 0]


def test_a_group_that_hangs_does_not_hold_the_run_for_ever(config, redis_client, play):
    impatient = config.trainer.model_copy(update={"batch_timeout_seconds": 3.0})
    made = orchestrator(config.model_copy(update={"trainer": impatient}), redis_client)
    made.issue()
    hanging, *others = play.read()
    for entry in others:
        play.scored.add(play.group(entry.message))
    assert trained(until_training(made)) == [1, 2]
    made.step += 1
    made.issue()
    for entry in play.read():
        play.scored.add(play.group(entry.message))
    assert trained(until_training(made)) == [3, 4]
    made.step += 1
    # It comes at last, too old by now, and is sampled again.
    play.scored.add(play.group(hanging.message))
    made.next_order()
    assert (0, 1, 2) in [(each.request, each.attempt, each.min_version) for each in play.prompts.scan()]


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
        assert made.next_order().action == step_pb2.STEP_ACTION_WAIT
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
    assert made.next_order().action == step_pb2.STEP_ACTION_WAIT
    assert made.next_order().action == step_pb2.STEP_ACTION_WAIT
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
        assert made.next_order().action == step_pb2.STEP_ACTION_WAIT
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


def test_a_lost_evaluation_group_is_issued_again(config, redis_client, play, monkeypatch):
    """As when Redis lost its data: without it, the evaluation ended the run after evaluation.timeout_seconds."""
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr("services.trainer.steps.orchestrator.RECONCILE_SECONDS", 0.3)
    made = orchestrator(config, redis_client)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(made.evaluate)
        deadline = time.monotonic() + 5
        while play.prompts.depth() < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        redis_client.flushdb()
        attempts = []
        while not waiting.done() and time.monotonic() < deadline:
            attempts += [prompt.attempt for prompt in play.prompts.scan()]
            play.answer()
        values = waiting.result(1)
    assert set(attempts) == {1}
    assert (values["greedy_accuracy"], values["sampled_accuracy"], values["failures"]) == (0.0, 0.5, 0.0)


def test_an_evaluation_group_that_is_lost_again_and_again_fails():
    prompts = {name: sample_pb2.Prompt(group_id=name) for name in ("lost", "alive")}
    issued = []
    evaluation = Evaluation("e", 1.0, prompts, issued.append)
    for _ in range(3):
        assert evaluation.issue_vanished({"alive"}) == ["lost"]
    assert [(prompt.group_id, prompt.attempt) for prompt in issued] == [("lost", 1), ("lost", 2), ("lost", 3)]
    evaluation.issue_vanished({"alive"})
    assert len(issued) == 3
    assert evaluation.failures == {"lost": ("vanished", "group lost was lost 4 times")}
    assert evaluation.missing == {"alive"}


def test_a_version_that_is_in_memory_alone_goes_to_disk_when_nothing_comes(config, redis_client, monkeypatch):
    """As when the only rollout was started again: it can load nothing else."""
    monkeypatch.setattr("services.trainer.steps.orchestrator.PUBLISH_AGAIN_SECONDS", 0.0)
    made = orchestrator(config, redis_client)
    made.feed.announce(weights_pb2.WeightVersion(version=3, fingerprint="m"))
    assert made.next_order().action == step_pb2.STEP_ACTION_PUBLISH
    made.feed.announce(weights_pb2.WeightVersion(version=3, fingerprint="f", path="/w"))
    assert made.next_order().action == step_pb2.STEP_ACTION_WAIT


def test_a_damaged_version_is_published_again_at_once_but_not_for_ever(config, redis_client):
    made = orchestrator(config, redis_client)
    before = counters.VERSIONS_REPAIRED._value.get()
    actions = []
    for _ in range(5):
        made.feed.announce(weights_pb2.WeightVersion(version=0, fingerprint="f", path="/w"))
        entry_id, _ = made.feed.latest()
        made.feed.report_damaged(entry_id)
        actions.append(made.next_order().action)
    assert actions == [step_pb2.STEP_ACTION_PUBLISH] * 3 + [step_pb2.STEP_ACTION_WAIT] * 2
    assert counters.VERSIONS_REPAIRED._value.get() == before + 3
    made.step = 1
    made.feed.announce(weights_pb2.WeightVersion(version=1, fingerprint="g", path="/w"))
    # Of the version before.
    made.feed.report_damaged(entry_id)
    assert made.next_order().action == step_pb2.STEP_ACTION_WAIT
    made.feed.report_damaged(made.feed.latest()[0])
    assert made.next_order().action == step_pb2.STEP_ACTION_PUBLISH
