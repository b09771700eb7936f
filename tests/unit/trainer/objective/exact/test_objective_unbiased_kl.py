"""Unbiasedness on a policy small enough to write down every sample: two tokens out of four."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from services.trainer.objective import KlPenalty, LossInputs, compute_loss
from services.trainer.objective.kl import k3, kl_estimate
from tests.support.trainer.objective_batches import objective

TOKENS = 4
START = TOKENS  # the row of the first token; after token t the row is t


def policy(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS + 1, TOKENS, generator=generator, dtype=torch.float64)


def sampled(logits, sample):
    first, second = sample
    table = logits.log_softmax(-1)
    return torch.stack([table[START, first], table[first, second]])


def expected_gradient(current, old, reference, penalty):
    """Σ over all samples of π_old(sample) · the gradient of the loss that the package gives it."""
    logits = current.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for sample in product(range(TOKENS), repeat=2):
        old_logprobs = sampled(old, sample)
        inputs = LossInputs(
            logprobs=sampled(logits, sample),
            old_logprobs=old_logprobs,
            rollout_logprobs=old_logprobs,
            reference_logprobs=sampled(reference, sample),
            sequence_ids=torch.tensor([0, 0]),
            advantages=torch.zeros(1, dtype=torch.float64),
            kept=torch.ones(1, dtype=torch.bool),
            total_tokens=2,
            total_sequences=1,
            max_length=2,
        )
        total = total + old_logprobs.sum().exp() * compute_loss(inputs, objective("dapo", kl=penalty)).loss
    (gradient,) = torch.autograd.grad(total, logits)
    return gradient


def exact_gradient(current, old, reference):
    """Of KL(current ‖ reference), mean over both positions, in the contexts that the old policy leads to."""
    logits = current.clone().requires_grad_()
    log_probabilities = logits.log_softmax(-1)
    kl = (log_probabilities.exp() * (log_probabilities - reference.log_softmax(-1))).sum(-1)
    visits = torch.cat([old[START].softmax(-1), torch.ones(1, dtype=torch.float64)])
    (gradient,) = torch.autograd.grad((visits * kl).sum() / 2, logits)
    return gradient


UNCLIPPED = KlPenalty("importance_sampling_corrected", coef=1.0, clip_ratio=1e9)


@pytest.mark.parametrize("seed", range(5))
def test_corrected_estimator_has_the_gradient_of_the_kl(seed):
    current, old, reference = policy(seed), policy(seed + 100), policy(seed + 200)
    exact = exact_gradient(current, old, reference)
    estimated = expected_gradient(current, old, reference, UNCLIPPED)
    assert exact.abs().max() > 1e-2
    assert (estimated - exact).abs().max() < 1e-10


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_plain_estimators_do_not_off_policy(estimator):
    current, old, reference = policy(0), policy(100), policy(200)
    estimated = expected_gradient(current, old, reference, replace(UNCLIPPED, estimator=estimator))
    assert (estimated - exact_gradient(current, old, reference)).abs().max() > 1e-2


@pytest.mark.parametrize(("estimator", "unbiased"), [("k1", False), ("k2", True), ("k3", False)])
def test_plain_estimators_on_policy(estimator, unbiased):
    current, reference = policy(0), policy(200)
    estimated = expected_gradient(current, current, reference, replace(UNCLIPPED, estimator=estimator))
    error = (estimated - exact_gradient(current, current, reference)).abs().max()
    assert error < 1e-10 if unbiased else error > 1e-2


def test_clip_is_what_biases_the_corrected_estimator():
    current, old, reference = policy(0), policy(100), policy(200)
    clipped = expected_gradient(current, old, reference, replace(UNCLIPPED, clip_ratio=1.0))
    assert (clipped - exact_gradient(current, old, reference)).abs().max() > 1e-2


def test_an_overflowing_ratio_is_clipped_without_nan():
    logprobs, old, reference = torch.tensor([-0.1], requires_grad=True), torch.tensor([-200.0]), torch.tensor([-0.2])
    kl = kl_estimate(logprobs, old, reference, KlPenalty(clip_ratio=5.0))
    bounded = 5 * k3(logprobs, reference)
    assert kl.log_scale.tolist() == [0]
    torch.testing.assert_close(kl.value, bounded)
    torch.testing.assert_close(*(torch.autograd.grad(value.sum(), logprobs) for value in (kl.value, bounded)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"estimator": "k4"}, r"estimator is 'k4', expected one of importance_sampling_corrected, k1, k2, k3"),
        ({"coef": -1.0}, r"coef is -1.0"),
        ({"coef": float("nan")}, r"coef is nan"),
        ({"clip_ratio": 0.0}, r"clip_ratio is 0.0"),
    ],
)
def test_bad_penalty_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(KlPenalty(), **change)
