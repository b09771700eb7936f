"""Evaluations of rank 0 over a real Redis; the test plays rollout and reward."""

import pytest
from trivet.v1 import sample_pb2

from services.common.errors import GaveUp, TrivetError, Unavailable
from services.trainer.steps.evaluation import Evaluation
from tests.support.trainer.orchestration import evaluated, orchestrator


def test_an_evaluation_waits_for_its_own_results(config, redis_client, play):
    made = orchestrator(config, redis_client)
    answered: list[int] = []
    values = evaluated(made, lambda: answered.extend(play.answer()))
    assert len(answered) == 4
    # Rewards are the indices: the greedy one fails, and one of two sampled ones succeeds.
    assert (values["greedy_accuracy"], values["sampled_accuracy"]) == (0.0, 0.5)
    assert play.scored.depth() == 0


@pytest.mark.parametrize("abandoned", [2, 9])
def test_an_evaluation_is_not_of_weights_that_the_run_has_gone_back_from(config, redis_client, play, abandoned):
    """Rollouts may still be on version 40 when the run starts again from its checkpoint of step 20."""
    impatient = config.evaluation.model_copy(update={"timeout_seconds": 1.0})
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

    if abandoned == 9:
        # It never stops: after some tries the groups stay missing.
        with pytest.raises(Unavailable, match="4 of 4 evaluation groups are missing"):
            evaluated(made, lambda: play.answer(under_old_weights))
        assert max(seen) == 3
    else:
        assert evaluated(made, lambda: play.answer(under_old_weights))["greedy_accuracy"] == 1.0
        assert sorted(seen) == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]


def test_an_evaluation_that_does_not_come_back_is_an_error(config, redis_client):
    impatient = config.evaluation.model_copy(update={"timeout_seconds": 0.1})
    made = orchestrator(config.model_copy(update={"evaluation": impatient}), redis_client)
    with pytest.raises(Unavailable, match="4 of 4 evaluation groups"):
        made.evaluate()


def test_an_evaluation_of_which_every_group_fails_is_not_tried_again_by_a_restart(config, redis_client, play):
    made = orchestrator(config, redis_client)

    def refuse():
        for entry in play.read():
            play.prompts.dead_letter(entry, TrivetError("scorer_metadata", "metadata.answer is missing"))

    with pytest.raises(GaveUp, match=r"all 4 groups .* \(4 × scorer_metadata\); the first because .*answer is missing"):
        evaluated(made, refuse)


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


def test_a_lost_evaluation_group_is_issued_again(config, redis_client, play, monkeypatch):
    """As when Redis lost its data: without it, the evaluation ended the run after evaluation.timeout_seconds."""
    monkeypatch.setattr("services.trainer.steps.orchestrator.RECONCILE_SECONDS", 0.3)
    made = orchestrator(config, redis_client)
    attempts = []

    def lose_the_first():
        if attempts:
            attempts.extend(prompt.attempt for prompt in play.prompts.scan())
            play.answer()
        elif play.prompts.depth() == 4:
            redis_client.flushdb()
            attempts.append(0)

    values = evaluated(made, lose_the_first)
    assert set(attempts) == {0, 1}
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
