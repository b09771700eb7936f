import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.objective import keep_sequences, sequence_divergence

FEW = [-1.0, -1.0, 1.0, -1.0, -1.0]
DRIFT = [0.3, 0.0, 0.9, 0.2, 0.5]


def keep(advantages, divergence, threshold=0.1, min_keep_ratio=0.0):
    return keep_sequences(torch.tensor(advantages), torch.tensor(divergence), threshold, min_keep_ratio).tolist()


def test_masks_only_what_is_worse_than_average_and_far():
    assert keep(FEW, DRIFT) == [False, True, True, False, False]


def test_threshold_itself_is_kept():
    assert keep([-1.0, -1.0], [0.5, 0.75], threshold=0.5) == [True, False]


@pytest.mark.parametrize(
    ("min_keep_ratio", "kept"),
    [
        (0.4, [False, True, True, False, False]),
        (0.41, [False, True, True, True, False]),
        (0.6, [False, True, True, True, False]),
        (0.8, [True, True, True, True, False]),
        (1.0, [True, True, True, True, True]),
    ],
)
def test_least_divergent_return_first(min_keep_ratio, kept):
    assert keep(FEW, DRIFT, min_keep_ratio=min_keep_ratio) == kept


def test_of_equal_divergence_the_earlier_returns():
    assert keep([-1.0] * 4, [0.5] * 4, min_keep_ratio=0.5) == [True, True, False, False]


def test_rounding_of_the_product_keeps_no_extra_sequence():
    """0.07 · 100 is 7.000000000000001 in floating point."""
    assert sum(keep([-1.0] * 100, [1.0] * 100, min_keep_ratio=0.07)) == 7


@given(
    st.lists(st.tuples(st.floats(-1, 1, width=32), st.floats(-1, 1, width=32)), min_size=1, max_size=12),
    st.floats(-1, 1),
    st.integers(0, 100),
)
def test_bound_holds_and_no_kept_one_is_lost(sequences, threshold, percent):
    advantages, divergence = (list(column) for column in zip(*sequences, strict=True))
    freely, bounded = (keep(advantages, divergence, threshold, ratio) for ratio in (0.0, percent / 100))
    fewest = -(-percent * len(sequences) // 100)
    assert sum(bounded) == max(sum(freely), fewest)
    assert all(after for before, after in zip(freely, bounded, strict=True) if before)
    returned = [d for d, before, after in zip(divergence, freely, bounded, strict=True) if after and not before]
    masked = [d for d, after in zip(divergence, bounded, strict=True) if not after]
    assert max(returned, default=-math.inf) <= min(masked, default=math.inf)


def test_divergence_is_the_mean_loss_of_log_probability():
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    divergence = sequence_divergence(logprobs, torch.tensor([-0.5, -1.0, -4.0]), torch.tensor([0, 0, 1]), 2)
    assert divergence.tolist() == [0.75, -1.0]
    assert not divergence.requires_grad


@pytest.mark.usefixtures("unchecked_signatures")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([-1.0], [0.1, 0.2]), r"divergence has shape \(2,\)"),
        (([[-1.0]], [[0.1]]), r"advantages has shape \(1, 1\)"),
        (([-1.0], [math.nan]), "divergence holds NaN"),
        (([math.nan], [0.0]), "advantages holds NaN"),
        (([-1.0], [0.1], 0.1, 1.5), "min_keep_ratio is 1.5"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        keep(*arguments)
