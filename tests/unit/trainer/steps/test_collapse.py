import random

import pytest

from services.trainer.steps.collapse import CollapseGuard
from tests.support.trainer.plain_engine import update_configuration


def guard(scored=(), trained=(), **collapse):
    return CollapseGuard(update_configuration(trainer={"collapse": collapse}), list(scored), list(trained))


def evaluations(*values, error=0.04):
    return [
        {"step": 10 * index, "asks": "same", "metrics": {"greedy_accuracy": value, "greedy_accuracy_error": error}}
        for index, value in enumerate(values)
    ]


def reason(values, rewards=(), **collapse):
    watching = guard(**collapse)
    for reward in rewards:
        watching.rewarded(reward)
    return watching.evaluated(evaluations(*values))


def test_three_fallen_evaluations_in_a_row_end_the_run_with_what_fell_from_what_to_what():
    assert reason((0.75, 0.0, 0.1)) is None
    assert reason((0.75, 0.0, 0.1, 0.05)) == (
        "held-out accuracy fell from 0.750 at step 0 to 0.000, 0.100, 0.050 at steps 10, 20, 30 (trainer.collapse)"
    )
    assert reason((0.75, 0.0), evaluations=1).endswith("to 0.000 at step 10 (trainer.collapse)")
    assert reason((0.75, 0.0, 0.7, 0.0, 0.0)) is None
    assert reason((0.75, 0.0, 0.1, 0.05), evaluation_share=0) is None


def test_a_reward_that_fell_ends_the_run_once_the_held_out_score_has_fallen_too():
    high, low = [0.6] * 20, [0.02] * 20
    reported = reason((0.5, 0.7, 0.0), high + low)
    assert reported.startswith(
        "the mean reward of 20 steps fell from 0.600 at its best to 0.020 (trainer.collapse), and "
    )
    assert "held-out accuracy fell from 0.700 at step 10 to 0.000 at step 20" in reported
    assert reason((0.5, 0.7, 0.0), high) is None


def test_harder_prompts_are_no_collapse_and_the_reward_is_measured_anew():
    watching = guard(reward_steps=5)
    assert not any(watching.rewarded(0.8) for _ in range(5))
    assert [watching.rewarded(0.0) for _ in range(5)] == [False] * 3 + [True] * 2
    assert watching.evaluated(evaluations(0.5, 0.6)) is None
    assert not any(watching.rewarded(0.0) for _ in range(20))


def test_where_held_out_scores_tell_nothing_the_reward_decides():
    assert "mean reward" in reason((0.0, 0.0), [0.6] * 20 + [0.02] * 20)


def test_a_small_reward_that_gets_smaller_is_none():
    assert reason((0.0,), [0.08] * 20 + [0.0] * 20) is None


def test_rewards_count_from_the_lowest_there_can_be():
    config = update_configuration(reward={"scorers": [{"name": "exact_match"}], "minimum": -1.0})
    watching = CollapseGuard(config, [], [])
    assert not any(watching.rewarded(0.0) for _ in range(20))
    assert not any(watching.rewarded(-0.7) for _ in range(20))
    assert [watching.rewarded(-0.9) for _ in range(20)][-1]


def test_a_restart_forgets_nothing():
    steps = [{"step": step, "metrics": {"reward_mean": 0.6 if step <= 20 else 0.02}} for step in range(1, 40)]
    again = guard(evaluations(0.75, 0.7, 0.0), steps)
    assert again.best.step == 0
    assert again.rewarded(0.02)
    assert again.evaluated(evaluations(0.75, 0.7, 0.0, 0.0)) is not None


def test_rewards_of_before_the_questions_changed_do_not_count():
    steps = [{"step": step, "metrics": {"reward_mean": 0.6}} for step in range(1, 41)]
    now = [{**entry, "step": 50, "asks": "other"} for entry in evaluations(0.2)]
    again = guard([*evaluations(0.75), *now], steps)
    assert not any(again.rewarded(0.02) for _ in range(40))


@pytest.mark.parametrize("chance", [0.02, 0.1, 0.2, 0.4, 0.6])
@pytest.mark.parametrize("seed", range(8))
def test_a_noisy_run_that_learns_nothing_goes_on(seed, chance):
    """Of 64 prompts some are right by chance, at each of 200 evaluations; rewards are of 64 samples a step."""
    draw = random.Random(seed)
    watching, entries = guard(), []
    for step in range(1, 2001):
        right = sum(draw.random() < chance for _ in range(64)) / 64
        if watching.rewarded(right) or step % 10 == 0:
            accuracy = sum(draw.random() < chance for _ in range(64)) / 64
            error = (accuracy * (1 - accuracy) / 63) ** 0.5
            entries.append({"step": step, "metrics": {"greedy_accuracy": accuracy, "greedy_accuracy_error": error}})
            assert watching.evaluated(entries) is None
