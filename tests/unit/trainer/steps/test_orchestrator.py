"""Rank 0 against a real Redis; the test plays rollout and reward."""

from types import SimpleNamespace

import pytest
from trivet.v1 import sample_pb2, step_pb2, weights_pb2

from services.common.errors import Unavailable
from services.trainer.metrics import counters
from services.trainer.steps import orchestrator as module
from services.trainer.steps.intake import Intake
from services.trainer.steps.orchestrator import Orchestrator
from tests.support.trainer.orchestration import GROUPS, SIZE, orchestrator, state, trained, until_training


def test_issues_within_the_bound_and_trains_each_group_once(config, redis_client, play):
    made = orchestrator(config, redis_client)
    seen = []
    for _ in range(3):
        made.issue()
        play.answer()
        order = until_training(made)
        assert order.action == step_pb2.STEP_ACTION_TRAIN
        assert len(order.replay) == GROUPS * SIZE
        seen += trained(order)
        made.step += 1
        assert made.ledger.cursor <= (made.step + 1 + 1) * GROUPS
    assert seen == list(range(3 * GROUPS))


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


def test_stop_and_save_come_before_training(config, redis_client):
    made = orchestrator(config, redis_client)
    made.controls.request_save()
    assert made.next_order().message.action == step_pb2.STEP_ACTION_SAVE
    made.controls.stop.set()
    assert made.next_order().message.action == step_pb2.STEP_ACTION_STOP


def test_a_paused_trainer_holds(config, redis_client, play):
    made = orchestrator(config, redis_client)
    made.issue()
    play.answer()
    made.controls.pause()
    assert made.next_order().message.action == step_pb2.STEP_ACTION_WAIT
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


@pytest.fixture
def patience(config):
    return config.trainer.batch_timeout_seconds


@pytest.fixture
def clock(monkeypatch, patience):
    """Goes on by a third of the trainer's patience with each look that finds nothing."""
    clock, poll = SimpleNamespace(now=0.0), Intake.poll

    def look(self, seconds):
        found = poll(self, seconds)
        clock.now += 0 if found else patience / 3
        return found

    monkeypatch.setattr(Intake, "poll", look)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_nothing_coming_back_is_an_error_that_names_the_backlog(config, redis_client, clock, patience):
    made = orchestrator(config, redis_client)
    # A long step before is no silence.
    clock.now += 2 * patience
    for _ in range(3):
        assert made.next_order().message.action == step_pb2.STEP_ACTION_WAIT
    with pytest.raises(Unavailable, match="entries waiting: prompts 4, samples 0, scored 0"):
        made.next_order()


def test_what_vanished_is_found_missing_while_waiting(config, redis_client, play, monkeypatch):
    monkeypatch.setattr("services.trainer.steps.orchestrator.RECONCILE_SECONDS", 0.0)
    made = orchestrator(config, redis_client)
    made.issue()
    redis_client.delete("run:prompts")
    made.next_order()
    assert sorted((entry.message.request, entry.message.attempt) for entry in play.read()) == [(n, 1) for n in range(4)]


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
        assert made.next_order().message.action == step_pb2.STEP_ACTION_WAIT
    play.scored.add(play.group(first.message))
    assert trained(until_training(made)) == [3, 0]


def test_a_group_that_hangs_does_not_hold_the_run_for_ever(config, redis_client, play, clock):
    made = orchestrator(config, redis_client)
    made.issue()
    hanging, *others = play.read()
    for entry in others:
        play.scored.add(play.group(entry.message))
    assert trained(until_training(made)) == [1, 2]
    made.step += 1
    made.issue()
    for entry in play.read():
        play.scored.add(play.group(entry.message))
    started = clock.now
    assert trained(until_training(made)) == [3, 4]
    assert clock.now > started
    made.step += 1
    # It comes at last, too old by now, and is sampled again.
    play.scored.add(play.group(hanging.message))
    made.next_order()
    assert (0, 1, 2) in [(each.request, each.attempt, each.min_version) for each in play.prompts.scan()]


def test_a_version_that_is_in_memory_alone_goes_to_disk_when_nothing_comes(config, redis_client, monkeypatch):
    """As when the only rollout was started again: it can load nothing else."""
    monkeypatch.setattr("services.trainer.steps.orchestrator.PUBLISH_AGAIN_SECONDS", 0.0)
    made = orchestrator(config, redis_client)
    made.feed.announce(weights_pb2.WeightVersion(version=3, fingerprint="m"))
    assert made.next_order().message.action == step_pb2.STEP_ACTION_PUBLISH
    made.feed.announce(weights_pb2.WeightVersion(version=3, fingerprint="f", path="/w"))
    assert made.next_order().message.action == step_pb2.STEP_ACTION_WAIT


def test_a_damaged_version_is_published_again_at_once_but_not_for_ever(config, redis_client):
    made = orchestrator(config, redis_client)
    before = counters.VERSIONS_REPAIRED._value.get()
    actions = []
    for _ in range(5):
        made.feed.announce(weights_pb2.WeightVersion(version=0, fingerprint="f", path="/w"))
        entry_id, _ = made.feed.latest()
        made.feed.report_damaged(entry_id)
        actions.append(made.next_order().message.action)
    assert actions == [step_pb2.STEP_ACTION_PUBLISH] * 3 + [step_pb2.STEP_ACTION_WAIT] * 2
    assert counters.VERSIONS_REPAIRED._value.get() == before + 3
    made.step = 1
    made.feed.announce(weights_pb2.WeightVersion(version=1, fingerprint="g", path="/w"))
    # Of the version before.
    made.feed.report_damaged(entry_id)
    assert made.next_order().message.action == step_pb2.STEP_ACTION_WAIT
    made.feed.report_damaged(made.feed.latest()[0])
    assert made.next_order().message.action == step_pb2.STEP_ACTION_PUBLISH
