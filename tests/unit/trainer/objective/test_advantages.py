import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.objective import group_relative

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0])
GROUPS = torch.tensor([7, 2, 7, 2, 7])


def test_none_subtracts_the_mean_of_the_group():
    expected = [1 - 4 / 3, -0.5, -4 / 3, 0.5, 3 - 4 / 3]
    assert group_relative(REWARDS, GROUPS).tolist() == pytest.approx(expected)


def test_std_divides_by_the_sample_deviation():
    found = group_relative(REWARDS, GROUPS, "std")
    for group in (2, 7):
        rewards = REWARDS[group == GROUPS]
        expected = (rewards - rewards.mean()) / (rewards.std(correction=1) + 1e-6)
        torch.testing.assert_close(found[group == GROUPS], expected)


@given(st.floats(-10, 10, width=32), st.integers(1, 9), st.sampled_from(["none", "std"]))
def test_equal_rewards_have_no_advantage(reward, size, normalization):
    found = group_relative(torch.full((size,), reward), torch.zeros(size, dtype=torch.int64), normalization)
    assert found.abs().max() < 1e-8


def test_integer_rewards_give_float_advantages():
    found = group_relative(torch.tensor([1, 0]), torch.tensor([0, 0]))
    assert found.tolist() == [0.5, -0.5]


@pytest.mark.usefixtures("unchecked_signatures")
@pytest.mark.parametrize(
    ("rewards", "groups", "normalization", "message"),
    [
        ([1.0], [0, 0], "none", r"group_ids has shape \(2,\)"),
        ([[1.0]], [[0]], "none", r"rewards has shape \(1, 1\)"),
        ([], [], "none", "rewards is empty"),
        ([math.nan], [0], "none", "rewards holds NaN"),
        ([1.0], [0], "rank", "normalization is 'rank', expected none or std"),
    ],
)
def test_bad_input_is_refused(rewards, groups, normalization, message):
    with pytest.raises(ValueError, match=message):
        group_relative(torch.tensor(rewards), torch.tensor(groups, dtype=torch.int64), normalization)
