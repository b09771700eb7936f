import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.objective import best_against_worst, group_relative, groups_with_variance

SCORED = st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.1, 1.0]), st.integers(-2, 3)), min_size=1, max_size=20)


def tensors(scored):
    rewards, ids = zip(*scored, strict=True)
    return torch.tensor(rewards), torch.tensor(ids)


def members(scored):
    """Positions by group, in ascending order of the groups."""
    return {group: [i for i, (_, of) in enumerate(scored) if of == group] for group in sorted({g for _, g in scored})}


@given(SCORED)
def test_variance_is_where_rewards_differ(scored):
    groups = members(scored)
    expected = [len({scored[i][0] for i in groups[group]}) > 1 for _, group in scored]
    assert groups_with_variance(*tensors(scored)).tolist() == expected


@given(SCORED)
def test_groups_without_variance_are_those_without_an_advantage(scored):
    varied = groups_with_variance(*tensors(scored))
    advantages = group_relative(*tensors(scored))
    assert not advantages[~varied].abs().gt(1e-8).any()
    groups = members(scored)
    for positions in groups.values():
        assert bool(advantages[positions].abs().gt(1e-8).any()) == bool(varied[positions[0]])


@given(SCORED)
def test_pairs_are_the_earliest_extremes_of_each_group_with_variance(scored):
    expected = []
    for positions in members(scored).values():
        best = max(positions, key=lambda i: (scored[i][0], -i))
        worst = min(positions, key=lambda i: (scored[i][0], i))
        if scored[best][0] > scored[worst][0]:
            expected.append([best, worst])
    found = best_against_worst(*tensors(scored))
    assert found.dtype == torch.int64
    assert found.shape == (len(expected), 2)
    assert found.tolist() == expected


def test_negative_rewards_are_not_mistaken_for_none():
    rewards, ids = torch.tensor([-3.0, -1.0, -2.0]), torch.tensor([5, 5, 5])
    assert best_against_worst(rewards, ids).tolist() == [[1, 0]]


def test_integer_rewards():
    assert groups_with_variance(torch.tensor([1, 1, 0]), torch.tensor([0, 0, 0])).all()


@pytest.mark.usefixtures("unchecked_signatures")
@pytest.mark.parametrize("function", [groups_with_variance, best_against_worst])
@pytest.mark.parametrize(
    ("rewards", "groups", "message"),
    [
        ([1.0], [0, 0], r"group_ids has shape \(2,\)"),
        ([], [], "rewards is empty"),
        ([math.inf], [0], "rewards holds NaN or infinity"),
    ],
)
def test_bad_input_is_refused(function, rewards, groups, message):
    with pytest.raises(ValueError, match=message):
        function(torch.tensor(rewards), torch.tensor(groups, dtype=torch.int64))
