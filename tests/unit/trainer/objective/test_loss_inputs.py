import math
from dataclasses import replace

import pytest
import torch

from tests.support.trainer.objective_batches import PER_TOKEN, step

FLOATS = (*PER_TOKEN, "advantages")


def spoil(tensor, value):
    spoiled = tensor.detach().clone()
    spoiled[-1] = value
    return spoiled


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"^{name} holds NaN or infinity"):
        replace(step(), **{name: spoil(getattr(step(), name), value)})


@pytest.mark.usefixtures("unchecked_signatures")
@pytest.mark.parametrize("name", [*PER_TOKEN, "kept", "truncated"])
def test_wrong_length_is_refused(name):
    with pytest.raises(ValueError, match=rf"^{name} has shape \(\d+,\), expected \(\d+,\)"):
        replace(step(), **{name: getattr(step(), name)[:-1]})


@pytest.mark.parametrize("name", FLOATS)
def test_half_precision_is_refused(name):
    with pytest.raises(ValueError, match=rf"^{name} has dtype torch.bfloat16, expected torch.float32 or torch.float64"):
        replace(step(), **{name: getattr(step(), name).bfloat16()})


@pytest.mark.usefixtures("unchecked_signatures")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_ids": torch.zeros(0, dtype=torch.int64)}, r"sequence_ids has shape \(0,\)"),
        ({"advantages": torch.zeros(0)}, r"advantages has shape \(0,\)"),
        ({"advantages": torch.tensor(1.0)}, r"advantages has shape \(\)"),
        ({"sequence_ids": torch.zeros(2, 5, dtype=torch.int64)}, r"sequence_ids has shape \(2, 5\)"),
        ({"sequence_ids": torch.zeros(10, dtype=torch.int32)}, "sequence_ids has dtype torch.int32"),
        ({"kept": torch.ones(4)}, "kept has dtype torch.float32"),
        ({"truncated": torch.ones(4)}, "truncated has dtype torch.float32"),
        ({"steps_applied": -1}, "steps_applied is -1, expected 0 or more"),
        ({"sequence_ids": torch.arange(10) % 5}, r"sequence_ids span 0\.\.4, expected 0\.\.3"),
        ({"sequence_ids": torch.arange(10) % 4 - 1}, r"sequence_ids span -1\.\.2, expected 0\.\.3"),
        ({"sequence_ids": torch.arange(10) % 3}, "sequence_ids leave a sequence of 4 without a token"),
        ({"total_tokens": 9}, "total_tokens is 9, expected at least the 10"),
        ({"total_sequences": 3}, "total_sequences is 3, expected at least the 4"),
        ({"max_length": 3}, "max_length is 3, expected at least the 4"),
    ],
)
def test_malformed_micro_batch_is_refused(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        replace(step(), **changes)


def test_lengths_follow_the_ids_in_any_order():
    assert replace(step(), sequence_ids=torch.tensor([3, 0, 0, 2, 1, 2, 2, 2, 0, 3])).lengths.tolist() == [3, 1, 4, 2]
