import math
from dataclasses import replace

import pytest

from services.trainer.objective import (
    ALGORITHMS,
    Algorithm,
    ImportanceCorrection,
    Objective,
    ValueLoss,
    compute_loss,
    find_algorithm,
)
from services.trainer.objective.policy_term import PolicyTerm
from tests.support.trainer.objective_batches import REWARD_ALGORITHMS, step


def reinforce():
    """−A·lp: a user's own algorithm."""
    return Algorithm("reinforce", reinforce_term, aggregation="token_mean", clip_low=0.0, clip_high=0.0)


def reinforce_term(inputs, clip):
    loss = -inputs.token_advantages * inputs.logprobs
    return PolicyTerm(loss=loss, ratio=loss.detach().new_ones(loss.shape), clipped=loss > float("inf"))


def not_an_algorithm():
    return 7


A_NUMBER = 7


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_each_algorithm_carries_its_name_and_its_source(name):
    assert find_algorithm(name).name == name
    assert "arXiv" in ALGORITHMS[name].__doc__


@pytest.mark.parametrize(
    ("name", "aggregation", "low", "high"),
    [
        ("ppo", "token_mean", 0.2, 0.2),
        ("grpo", "sequence_mean", 0.2, 0.2),
        ("dr_grpo", "fixed_length", 0.2, 0.2),
        ("dapo", "token_mean", 0.2, 0.28),
        ("gspo", "sequence_mean", 3e-4, 4e-4),
        ("cispo", "token_mean", 1.0, 4.0),
    ],
)
def test_defaults(name, aggregation, low, high):
    found = find_algorithm(name)
    assert (found.aggregation, found.clip_low, found.clip_high) == (aggregation, low, high)


def test_override_takes_only_what_is_given():
    changed = find_algorithm("gspo").override(clip_high=0.0)
    assert (changed.aggregation, changed.clip_low, changed.clip_high) == ("sequence_mean", 3e-4, 0.0)
    assert find_algorithm("gspo").override() == find_algorithm("gspo")


def test_override_of_value_and_entropy():
    changed = find_algorithm("ppo").override(value_clip=0.0, entropy_coef=0.01)
    assert changed.value == ValueLoss(coef=0.5, clip=0.0)
    assert changed.entropy_coef == 0.01
    assert changed.override(value_coef=2.0) == replace(changed, value=ValueLoss(coef=2.0, clip=0.0))
    assert find_algorithm("ppo").override() == find_algorithm("ppo")
    assert find_algorithm("grpo").value is None
    assert {find_algorithm(name).entropy_coef for name in REWARD_ALGORITHMS} == {0.0}


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("grpo", {"value_coef": 0.5}, "value_coef is 0.5, expected none: grpo has no value head"),
        ("grpo", {"value_clip": 0.0}, "value_clip is 0.0, expected none: grpo has no value head"),
        ("ppo", {"value_coef": -1.0}, "value_coef is -1.0"),
        ("ppo", {"value_clip": math.nan}, "value_clip is nan"),
        ("grpo", {"entropy_coef": -0.1}, "entropy_coef is -0.1"),
    ],
)
def test_bad_override_is_refused(name, overrides, message):
    with pytest.raises(ValueError, match=message):
        find_algorithm(name).override(**overrides)


def test_own_algorithm_by_import_path():
    own = find_algorithm(f"{__name__}:reinforce")
    inputs = step()
    outputs = compute_loss(inputs, Objective(own, ImportanceCorrection("none"), None))
    kept = (inputs.kept & ~inputs.truncated)[inputs.sequence_ids]
    expected = -(inputs.token_advantages * inputs.logprobs)[kept].sum() / 10
    assert outputs.loss.item() == pytest.approx(expected.item())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "grop",
            "algorithm.name is 'grop', expected one of ppo, grpo, dr_grpo, dapo, gspo, cispo, dpo, or module:function",
        ),
        ("", "algorithm.name is '', expected one of ppo"),
        (":grpo", "algorithm.name is ':grpo', expected one of ppo"),
        ("no_such_module_here:f", "No module named 'no_such_module_here'"),
        (f"{__name__}:absent", "absent"),
        (f"{__name__}:A_NUMBER", "expected a function that returns an Algorithm"),
        (f"{__name__}:not_an_algorithm", "expected a function that returns an Algorithm or PreferenceAlgorithm: 7"),
    ],
)
def test_unknown_names_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        find_algorithm(name)


def test_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="aggregation is 'mean', expected one of token_mean"):
        find_algorithm("grpo").override(aggregation="mean")
