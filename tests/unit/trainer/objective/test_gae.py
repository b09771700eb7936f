import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.objective import generalized_advantages, terminal_rewards


def recursion(rewards, values, gamma, lambda_):
    """Of one sequence, backwards, as a textbook has it."""
    advantages = np.zeros(len(rewards))
    following_value = following = 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * following_value - values[t]
        following = delta + gamma * lambda_ * following
        advantages[t], following_value = following, values[t]
    return advantages


@st.composite
def packed(draw):
    """Sequences whose tokens interleave, each with a token."""
    sequences = draw(st.integers(1, 4))
    extra = draw(st.lists(st.integers(0, sequences - 1), max_size=30))
    ids = draw(st.permutations([*range(sequences), *extra]))
    generator = np.random.default_rng(draw(st.integers(0, 2**16)))
    return np.array(ids), sequences, generator.normal(size=len(ids)), generator.normal(size=len(ids))


FACTORS = st.sampled_from([0.0, 0.5, 0.95, 1.0])


@given(packed(), FACTORS, FACTORS)
def test_follows_the_recursion_in_every_sequence(batch, gamma, lambda_):
    ids, sequences, rewards, values = batch
    advantages, returns = generalized_advantages(
        torch.tensor(rewards), torch.tensor(values), torch.tensor(ids), sequences, gamma, lambda_
    )
    for sequence in range(sequences):
        of = ids == sequence
        expected = recursion(rewards[of], values[of], gamma, lambda_)
        np.testing.assert_allclose(advantages.numpy()[of], expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(returns.numpy(), advantages.numpy() + values, rtol=1e-10, atol=1e-12)


@given(packed())
def test_lambda_one_returns_the_discounted_rewards(batch):
    ids, sequences, rewards, values = batch
    _, returns = generalized_advantages(
        torch.tensor(rewards), torch.tensor(values), torch.tensor(ids), sequences, gamma=0.9, lambda_=1.0
    )
    for sequence in range(sequences):
        of = ids == sequence
        for t, found in enumerate(returns.numpy()[of]):
            ahead = rewards[of][t:]
            assert found == pytest.approx(float((0.9 ** np.arange(len(ahead)) * ahead).sum()), rel=1e-9, abs=1e-11)


@given(packed())
def test_true_values_leave_no_advantage(batch):
    ids, sequences, rewards, _ = batch
    true = np.zeros(len(ids))
    for sequence in range(sequences):
        of = ids == sequence
        true[of] = rewards[of][::-1].cumsum()[::-1]
    advantages, _ = generalized_advantages(torch.tensor(rewards), torch.tensor(true), torch.tensor(ids), sequences)
    assert advantages.abs().max() < 1e-12


def test_a_long_sequence_in_float32():
    generator = np.random.default_rng(0)
    rewards, values = (generator.normal(size=5000).astype(np.float32) for _ in range(2))
    advantages, returns = generalized_advantages(
        torch.tensor(rewards), torch.tensor(values), torch.zeros(5000, dtype=torch.int64), 1, 0.999, 0.99
    )
    assert advantages.dtype == returns.dtype == torch.float32
    expected = recursion(rewards.astype(float), values.astype(float), 0.999, 0.99)
    np.testing.assert_allclose(advantages.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_results_carry_no_gradient():
    values = torch.zeros(3, requires_grad=True)
    advantages, returns = generalized_advantages(torch.ones(3), values, torch.zeros(3, dtype=torch.int64), 1)
    assert not advantages.requires_grad
    assert not returns.requires_grad


def test_terminal_rewards_stand_on_the_last_token():
    ids = torch.tensor([1, 0, 1, 0, 2, 0])
    assert terminal_rewards(torch.tensor([1.0, 2.0, 3.0]), ids, 3).tolist() == [0, 0, 2, 0, 3, 1]


@pytest.mark.parametrize(
    ("rewards", "ids", "message"),
    [
        ([1.0], [0, 1], r"rewards has shape \(1,\), expected \(2,\)"),
        ([1.0, 2.0], [1, 1], "sequence_ids leave a sequence of 2 without a token"),
    ],
)
def test_bad_terminal_rewards_are_refused(rewards, ids, message):
    with pytest.raises(ValueError, match=message):
        terminal_rewards(torch.tensor(rewards), torch.tensor(ids), 2)


@pytest.mark.usefixtures("unchecked_signatures")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": [1.0]}, r"rewards has shape \(1,\), expected \(2,\)"),
        ({"values": [[1.0, 1.0]]}, r"values has shape \(1, 2\)"),
        ({"rewards": [math.nan, 0.0]}, "rewards holds NaN"),
        ({"values": [math.inf, 0.0]}, "values holds NaN or infinity"),
        ({"gamma": 1.1}, "gamma is 1.1, expected 0 to 1"),
        ({"lambda_": -0.1}, "lambda_ is -0.1"),
        ({"gamma": math.nan}, "gamma is nan"),
    ],
)
def test_bad_input_is_refused(changes, message):
    arguments = {"rewards": [1.0, 0.0], "values": [0.0, 0.0], "gamma": 1.0, "lambda_": 1.0} | changes
    with pytest.raises(ValueError, match=message):
        generalized_advantages(
            torch.tensor(arguments["rewards"]),
            torch.tensor(arguments["values"]),
            torch.zeros(2, dtype=torch.int64),
            1,
            arguments["gamma"],
            arguments["lambda_"],
        )
