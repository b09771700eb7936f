"""The shapes that signatures state are checked in unit tests."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from jaxtyping import TypeCheckError

from services.trainer.objective import token_log_ratio
from services.trainer.objective.segments import segment_sum
from tests.support.shapes import CHECKED, unchecked
from tests.support.trainer.objective_batches import step


@pytest.mark.parametrize("module", CHECKED)
def test_every_module_that_states_shapes_is_checked(module):
    """Of one that was imported before there was a check, this is how it was imported."""
    assert "jaxtyping" in type(find_spec(module).loader).__module__


def test_modules_are_found():
    assert len(CHECKED) > 30


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
