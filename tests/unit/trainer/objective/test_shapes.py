"""The shapes that signatures state are checked while these tests run."""

from dataclasses import replace

import pytest
import torch
from jaxtyping import TypeCheckError

from services.trainer.objective import token_log_ratio
from services.trainer.objective.segments import segment_sum
from tests.support.objective_batches import step
from tests.support.shapes import unchecked


def test_two_lengths_of_one_axis_are_refused():
    with pytest.raises(TypeCheckError, match="parameter 'old_logprobs'"):
        token_log_ratio(torch.zeros(3), torch.zeros(2))


def test_a_second_axis_is_refused():
    with pytest.raises(TypeCheckError, match="parameter 'values'"):
        segment_sum(torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64), 1)


def test_another_dtype_is_refused():
    with pytest.raises(TypeCheckError, match="parameter 'sequence_ids'"):
        segment_sum(torch.zeros(3), torch.zeros(3), 1)


def test_fields_are_checked():
    with pytest.raises(TypeCheckError, match="parameter 'kept'"):
        replace(step(), kept=torch.ones(3, dtype=torch.bool))


def test_the_check_can_be_switched_off_for_a_while():
    with unchecked():
        assert token_log_ratio(torch.zeros(3), torch.zeros(1)).shape == (3,)
    with pytest.raises(TypeCheckError):
        token_log_ratio(torch.zeros(3), torch.zeros(1))
