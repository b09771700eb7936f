import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.objective import dpo_loss

NAMES = ("chosen", "rejected", "reference_chosen", "reference_rejected")
SETTINGS = {"beta": st.sampled_from([0.05, 0.1, 1.0]), "label_smoothing": st.sampled_from([0.0, 0.1, 0.4])}


def pairs(seed, size):
    """Sums of log-probabilities, the policy's first."""
    sums = -np.abs(np.random.default_rng(seed).normal(20, 5, size=(4, size)))
    return dict(zip(NAMES, torch.tensor(sums), strict=True))


def leaves(sums):
    return sums | {name: sums[name].clone().requires_grad_() for name in NAMES[:2]}


def equation_7(sums, beta, label_smoothing):
    chosen, rejected, reference_chosen, reference_rejected = (sums[name].numpy() for name in NAMES)
    margin = beta * (chosen - reference_chosen) - beta * (rejected - reference_rejected)
    right, wrong = np.log1p(np.exp(-margin)), np.log1p(np.exp(margin))
    return margin, (1 - label_smoothing) * right + label_smoothing * wrong


@given(st.integers(0, 2**16), st.integers(1, 8), SETTINGS["beta"], SETTINGS["label_smoothing"])
def test_follows_the_equation(seed, size, beta, label_smoothing):
    sums = pairs(seed, size)
    margin, losses = equation_7(sums, beta, label_smoothing)
    outputs = dpo_loss(**sums, total_pairs=size, beta=beta, label_smoothing=label_smoothing)
    metrics = outputs.metrics.values()
    assert outputs.loss.item() == pytest.approx(losses.mean(), rel=1e-12)
    assert metrics["loss"] == pytest.approx(losses.mean(), rel=1e-12)
    assert metrics["preference_accuracy"] == np.mean(margin > 0)
    assert metrics["preference_margin"] == pytest.approx(margin.mean())
    assert (metrics["preference_margin_min"], metrics["preference_margin_max"]) == pytest.approx(
        (margin.min(), margin.max())
    )
    assert metrics["chosen_reward"] - metrics["rejected_reward"] == pytest.approx(metrics["preference_margin"])
    log_ratio = (sums["chosen"] - sums["reference_chosen"]).mean().item()
    assert metrics["chosen_reward"] == pytest.approx(beta * log_ratio)


@given(st.integers(0, 2**16), st.integers(1, 8), SETTINGS["beta"], SETTINGS["label_smoothing"])
def test_gradient_is_that_of_the_paper(seed, size, beta, label_smoothing):
    """−beta · σ(−margin) on the chosen, its opposite on the rejected; smoothing takes its share back."""
    sums = leaves(pairs(seed, size))
    loss = dpo_loss(**sums, total_pairs=size, beta=beta, label_smoothing=label_smoothing).loss
    chosen, rejected = torch.autograd.grad(loss, [sums["chosen"], sums["rejected"]])
    margin, _ = equation_7({name: value.detach() for name, value in sums.items()}, beta, label_smoothing)
    expected = -beta * ((1 - label_smoothing) - 1 / (1 + np.exp(-margin))) / size
    np.testing.assert_allclose(chosen.numpy(), expected, rtol=1e-9, atol=1e-15)
    assert torch.equal(rejected, -chosen)


@given(st.integers(0, 2**16), st.integers(2, 8), st.data())
def test_shares_of_micro_batches_add_up(seed, size, data):
    order = data.draw(st.permutations(range(size)))
    cut = data.draw(st.integers(1, size - 1))
    sums = pairs(seed, size)
    whole = dpo_loss(**sums, total_pairs=size)
    first, second = (
        dpo_loss(**{name: value[list(part)] for name, value in sums.items()}, total_pairs=size)
        for part in (order[:cut], order[cut:])
    )
    torch.testing.assert_close(first.loss + second.loss, whole.loss, rtol=1e-12, atol=0)
    assert (first.metrics + second.metrics).values() == pytest.approx(whole.metrics.values(), rel=1e-12)


@given(st.integers(0, 2**16), st.integers(1, 8))
def test_the_reference_itself_has_no_margin(seed, size):
    sums = pairs(seed, size)
    same = sums | {"chosen": sums["reference_chosen"], "rejected": sums["reference_rejected"]}
    outputs = dpo_loss(**same, total_pairs=size)
    assert outputs.loss.item() == pytest.approx(math.log(2))
    assert outputs.metrics.values()["preference_margin"] == 0
    assert outputs.metrics.values()["preference_accuracy"] == 0.5


def test_the_reference_carries_no_gradient():
    moving = {name: value.requires_grad_() for name, value in pairs(0, 3).items()}
    gradients = torch.autograd.grad(dpo_loss(**moving, total_pairs=3).loss, list(moving.values()), allow_unused=True)
    assert [gradient is None for gradient in gradients] == [False, False, True, True]


def test_a_hopeless_pair_is_finite_in_float32():
    sums = {name: torch.tensor([value]) for name, value in zip(NAMES, (-9000.0, -10.0, -10.0, -9000.0), strict=True)}
    sums = leaves(sums)
    loss = dpo_loss(**sums, total_pairs=1, beta=1.0).loss
    assert loss.item() == pytest.approx(17980)
    assert torch.autograd.grad(loss, sums["chosen"])[0].item() == -1


@pytest.mark.usefixtures("unchecked_signatures")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chosen": torch.zeros(0)}, r"chosen has shape \(0,\), expected one axis with at least one pair"),
        ({"rejected": torch.zeros(2)}, r"rejected has shape \(2,\), expected \(3,\)"),
        ({"reference_chosen": torch.zeros(3).bfloat16()}, "reference_chosen has dtype torch.bfloat16"),
        ({"reference_rejected": torch.tensor([0.0, math.nan, 0.0])}, "reference_rejected holds NaN"),
        ({"total_pairs": 2}, "total_pairs is 2, expected at least the 3"),
        ({"beta": 0.0}, "beta is 0.0"),
        ({"label_smoothing": 0.5}, "label_smoothing is 0.5, expected 0 or more and less than 0.5"),
        ({"label_smoothing": -0.1}, "label_smoothing is -0.1"),
    ],
)
def test_bad_input_is_refused(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        dpo_loss(**({**pairs(0, 3), "total_pairs": 3} | changes))
