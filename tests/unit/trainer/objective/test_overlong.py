import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.objective import overlong_penalty


def soft_punishment(length, max_length, cache):
    """Equation 13 of arXiv 2503.14476, line by line."""
    if length <= max_length - cache:
        return 0.0
    if length <= max_length:
        return ((max_length - cache) - length) / cache
    return -1.0


@given(st.data())
def test_follows_the_equation(data):
    max_length = data.draw(st.integers(1, 40))
    buffer = data.draw(st.integers(1, max_length))
    lengths = torch.arange(2 * max_length)
    expected = np.array([soft_punishment(int(length), max_length, buffer) for length in lengths])
    np.testing.assert_allclose(overlong_penalty(lengths, max_length, buffer).numpy(), expected, rtol=1e-6)


def test_numbers():
    found = overlong_penalty(torch.tensor([0, 12, 13, 14, 16, 17]), max_length=16, buffer=4)
    assert found.tolist() == [0, 0, -0.25, -0.5, -1, -1]


@pytest.mark.usefixtures("unchecked_signatures")
@pytest.mark.parametrize(
    ("lengths", "buffer", "message"),
    [
        ([1], 0, r"buffer is 0, expected 1 to max_length \(16\)"),
        ([1], 17, "buffer is 17"),
        ([1.0], 4, "lengths is torch.float32 of shape"),
        ([[1]], 4, r"lengths is torch.int64 of shape \(1, 1\), expected"),
    ],
)
def test_bad_input_is_refused(lengths, buffer, message):
    with pytest.raises(ValueError, match=message):
        overlong_penalty(torch.tensor(lengths), 16, buffer)
