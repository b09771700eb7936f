"""Losses over advantages, values and log-probs from 1e-30 to 1e30, all seven algorithms, against mpmath.

What float32 holds is right; what it does not hold is infinite or NaN, so that the step is skipped, and never a number
that only looks like a loss. test_overflow.py has the ratios that overflow.
"""

import math

import mpmath as mp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.objective import (
    ImportanceCorrection,
    LossInputs,
    Objective,
    compute_loss,
    dpo_loss,
    find_algorithm,
)
from services.trainer.objective.types import AGGREGATIONS
from tests.support.trainer.objective_batches import REWARD_ALGORITHMS

LARGEST = torch.finfo(torch.float32).max
# Of what was added up: some rounding of a float32 for each operation.
ROUNDING = 1e-5
# Of a squared difference, in squares of what is subtracted: two of 6e-8 at the most, against ROUNDING of the square.
DIFFERENCE_ROUNDING = 2e-9
MAX_LENGTH = 4

near = st.floats(-3, 0, width=32)
# Exponents of what an advantage, or a value and its return, are multiplied with.
exponents = st.sampled_from([-30, -18, -6, 0, 6, 18, 30])


def scaled(draw, count, exponent):
    numbers = draw(st.lists(st.floats(-2, 2, width=16), min_size=count, max_size=count))
    return torch.tensor([number * 10.0**exponent for number in numbers], dtype=torch.float32)


@st.composite
def steps(draw):
    lengths = draw(st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=3))
    ids = torch.tensor([sequence for sequence, length in enumerate(lengths) for _ in range(length)])
    logprobs, old = (torch.tensor(draw(st.lists(near, min_size=len(ids), max_size=len(ids)))) for _ in range(2))
    advantage, value = draw(exponents), draw(exponents)
    return LossInputs(
        logprobs=logprobs.requires_grad_(),
        old_logprobs=old,
        rollout_logprobs=old,
        reference_logprobs=None,
        sequence_ids=ids,
        advantages=scaled(draw, len(lengths), advantage),
        kept=torch.tensor(draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))),
        total_tokens=len(ids),
        total_sequences=len(lengths),
        max_length=MAX_LENGTH,
        entropies=torch.zeros(len(ids), requires_grad=True),
        values=scaled(draw, len(ids), value).requires_grad_(),
        old_values=scaled(draw, len(ids), value),
        returns=scaled(draw, len(ids), value),
        gae_advantages=scaled(draw, len(ids), advantage),
    )


def exact(numbers):
    return [mp.mpf(number) for number in numbers.tolist()]


def token_losses(inputs, algorithm):
    """The policy term of each token, by the formulas of docs/algorithms.md."""
    log_ratios = [new - old for new, old in zip(exact(inputs.logprobs), exact(inputs.old_logprobs), strict=True)]
    ids = inputs.sequence_ids.tolist()
    advantages = exact(inputs.gae_advantages if algorithm.name == "ppo" else inputs.token_advantages)
    for token, (sequence, advantage) in enumerate(zip(ids, advantages, strict=True)):
        own = [log for log, owner in zip(log_ratios, ids, strict=True) if owner == sequence]
        ratio = mp.exp(sum(own) / len(own) if algorithm.name == "gspo" else log_ratios[token])
        bounded = min(max(ratio, 1 - mp.mpf(algorithm.clip_low)), 1 + mp.mpf(algorithm.clip_high))
        if not inputs.kept[sequence]:
            yield mp.mpf(0)
        elif algorithm.name == "cispo":
            yield -bounded * advantage * mp.mpf(inputs.logprobs[token].item())
        else:
            yield -min(ratio * advantage, bounded * advantage)


def value_losses(inputs, settings):
    for value, old, returned in zip(exact(inputs.values), exact(inputs.old_values), exact(inputs.returns), strict=True):
        clip = mp.mpf(settings.clip)
        moved = old + min(max(value - old, -clip), clip)
        yield mp.mpf(settings.coef) * max((value - returned) ** 2, (moved - returned) ** 2) / 2


def value_roundings(inputs, settings):
    """How far rounding may move each value's loss. What is squared is a difference, also where it is tiny or 0 itself:
    moving the old value by all that it may move does not give the new one to the last digit.
    """
    for numbers in zip(exact(inputs.values), exact(inputs.old_values), exact(inputs.returns), strict=True):
        yield mp.mpf(settings.coef) / 2 * max(abs(number) for number in numbers) ** 2 * DIFFERENCE_ROUNDING


def divisor(inputs, aggregation, token):
    match aggregation:
        case "token_mean":
            return inputs.total_tokens
        case "sequence_mean":
            return inputs.lengths[inputs.sequence_ids[token]].item() * inputs.total_sequences
        case "fixed_length":
            return inputs.total_sequences * inputs.max_length


def check(found, parts, truth=None, rounding=0):
    """`parts` are what was added up, or the greatest of what went into the result."""
    size = mp.fsum(abs(part) for part in parts)
    truth = mp.fsum(parts) if truth is None else truth
    if size > LARGEST / 10:
        assert not math.isfinite(found) or abs(found - truth) <= 1e-3 * size
    else:
        # Below the smallest normal number, float32 has fewer digits.
        assert abs(found - truth) <= ROUNDING * size + rounding + 1e-37


@pytest.mark.parametrize("name", REWARD_ALGORITHMS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(max_examples=20)
@given(steps())
def test_a_loss_is_what_it_is_in_exact_numbers(name, aggregation, inputs):
    algorithm = find_algorithm(name).override(aggregation)
    outputs = compute_loss(inputs, Objective(algorithm, ImportanceCorrection("none"), None))
    parts = [loss / divisor(inputs, aggregation, token) for token, loss in enumerate(token_losses(inputs, algorithm))]
    values = outputs.metrics.values()
    check(values["policy_loss"], parts)
    rounding = mp.mpf(0)
    if algorithm.value is not None:
        of_values = [
            loss / divisor(inputs, aggregation, token)
            for token, loss in enumerate(value_losses(inputs, algorithm.value))
        ]
        rounding = mp.fsum(
            error / divisor(inputs, aggregation, token)
            for token, error in enumerate(value_roundings(inputs, algorithm.value))
        )
        check(values["value_loss"], of_values, rounding=rounding)
        parts += of_values
    check(outputs.loss.item(), parts, rounding=rounding)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(*[st.floats(-2, 0, width=16)] * 4), min_size=1, max_size=4),
    exponents,
    st.sampled_from([1e-3, 0.1, 10.0]),
    st.sampled_from([0.0, 0.1]),
)
def test_a_dpo_loss_is_what_it_is_in_exact_numbers(sums, exponent, beta, smoothing):
    chosen, rejected, *reference = torch.tensor(sums, dtype=torch.float64).mul(10.0**exponent).float().unbind(1)
    outputs = dpo_loss(chosen, rejected, *reference, total_pairs=len(sums), beta=beta, label_smoothing=smoothing)
    truth, size, smooth = mp.mpf(0), mp.mpf(0), mp.mpf(smoothing)
    for own, other, own_reference, other_reference in zip(*map(exact, (chosen, rejected, *reference)), strict=True):
        margin = mp.mpf(beta) * ((own - own_reference) - (other - other_reference))
        truth += (1 - smooth) * mp.log1p(mp.exp(-margin)) + smooth * mp.log1p(mp.exp(margin))
        size += 1 + mp.mpf(beta) * (abs(own) + abs(other) + abs(own_reference) + abs(other_reference))
    check(outputs.loss.item(), [size / len(sums)], truth / len(sums))
