import math

import pytest
import torch

from services.trainer.objective import Clip
from services.trainer.objective.policy_term import cispo_term, clipped_term, sequence_log_ratio, token_log_ratio

CLIP = Clip(0.2, 0.28)
RATIO = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("advantage", "loss", "gradient", "clipped"),
    [
        (1.0, [-0.5, -1.0, -1.28], [-1, -1, 0], [False, False, True]),
        (-1.0, [0.8, 1.0, 2.0], [0, 1, 1], [True, False, False]),
        (0.0, [0, 0, 0], [0, 0, 0], [False, False, False]),
    ],
)
def test_clipped_term_stops_where_the_ratio_has_gone_far_enough(advantage, loss, gradient, clipped):
    ratio = RATIO.clone().requires_grad_()
    term = clipped_term(ratio.log(), torch.full_like(RATIO, advantage), CLIP)
    (found,) = torch.autograd.grad(term.loss.sum(), ratio)
    assert term.loss.tolist() == pytest.approx(loss)
    assert found.tolist() == pytest.approx(gradient)
    assert term.clipped.tolist() == clipped


def test_cispo_bounds_the_weight_and_keeps_every_gradient():
    logprobs = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    log_ratio = token_log_ratio(logprobs, logprobs.detach() - RATIO.log())
    term = cispo_term(logprobs, log_ratio, advantages, CLIP)
    (gradient,) = torch.autograd.grad(term.loss.sum(), logprobs)
    assert gradient.tolist() == pytest.approx([-0.8, -1.0, 1.28])
    assert term.clipped.tolist() == [True, False, True]


def test_sequence_ratio_is_the_geometric_mean_whose_gradient_is_shared():
    ids = torch.tensor([0, 1, 0])
    logprobs = torch.tensor([4.0, 3.0, 1.0], dtype=torch.float64).log().requires_grad_()
    ratio = sequence_log_ratio(logprobs, torch.zeros(3, dtype=torch.float64), ids, 2).exp()
    assert ratio.tolist() == pytest.approx([2, 3, 2])
    (gradient,) = torch.autograd.grad(ratio[0], logprobs)
    assert gradient.tolist() == pytest.approx([1, 0, 1])


@pytest.mark.parametrize(
    ("low", "high", "message"),
    [
        (-0.1, 0.2, "clip_low is -0.1"),
        (1.1, 0.2, "clip_low is 1.1"),
        (0.2, -1.0, "clip_high"),
        (math.nan, 0, "clip_low"),
    ],
)
def test_bad_clip_is_refused(low, high, message):
    with pytest.raises(ValueError, match=message):
        Clip(low, high)
