"""What holds for every algorithm, aggregation, correction and estimator."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from objective_batches import divided_steps, objective, objectives, step, steps

from services.trainer.objective import ALGORITHMS, KlPenalty, compute_loss

EXACT = {"rtol": 1e-11, "atol": 1e-13}


def loss_and_gradient(inputs, chosen):
    loss = compute_loss(inputs, chosen).loss
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs)
    return loss.detach(), gradient


@given(divided_steps(), objectives())
def test_shares_of_reordered_micro_batches_add_up_to_the_step(divided, chosen):
    inputs, micro_batches = divided
    whole_loss, whole_gradient = loss_and_gradient(inputs, chosen)
    total, gradient = torch.zeros_like(whole_loss), torch.zeros_like(whole_gradient)
    for part in micro_batches:
        loss, part_gradient = loss_and_gradient(part.inputs, chosen)
        total += loss
        gradient[part.tokens] += part_gradient
    torch.testing.assert_close(total, whole_loss, **EXACT)
    torch.testing.assert_close(gradient, whole_gradient, **EXACT)


@given(divided_steps(), objectives())
def test_metrics_of_micro_batches_add_up_to_the_step(divided, chosen):
    inputs, micro_batches = divided
    first, *rest = (compute_loss(part.inputs, chosen).metrics for part in micro_batches)
    merged = sum(rest, start=first)
    assert merged.values() == pytest.approx(compute_loss(inputs, chosen).metrics.values(), rel=1e-11, abs=1e-13)


@given(steps(), objectives(), st.randoms(use_true_random=False))
def test_order_of_tokens_does_not_matter(inputs, chosen, random):
    order = torch.tensor(random.sample(range(len(inputs.logprobs)), len(inputs.logprobs)))
    shuffled = replace(
        inputs,
        logprobs=inputs.logprobs.detach()[order].requires_grad_(),
        old_logprobs=inputs.old_logprobs[order],
        rollout_logprobs=inputs.rollout_logprobs[order],
        reference_logprobs=inputs.reference_logprobs[order],
        sequence_ids=inputs.sequence_ids[order],
    )
    loss, gradient = loss_and_gradient(inputs, chosen)
    shuffled_loss, shuffled_gradient = loss_and_gradient(shuffled, chosen)
    torch.testing.assert_close(shuffled_loss, loss, **EXACT)
    torch.testing.assert_close(shuffled_gradient, gradient[order], **EXACT)


@given(steps(), objectives())
def test_mask_takes_the_policy_gradient_of_its_sequences_and_touches_no_other(inputs, chosen):
    chosen = replace(chosen, kl=None)
    _, open_gradient = loss_and_gradient(replace(inputs, kept=torch.ones_like(inputs.kept)), chosen)
    _, gradient = loss_and_gradient(inputs, chosen)
    kept = inputs.kept[inputs.sequence_ids]
    assert torch.equal(gradient[kept], open_gradient[kept])
    assert not gradient[~kept].any()


@given(steps(), objectives())
def test_mask_leaves_the_kl_term_alone(inputs, chosen):
    opened = replace(inputs, kept=torch.ones_like(inputs.kept))
    masked, unmasked = (compute_loss(each, chosen).metrics.values() for each in (inputs, opened))
    assert masked["kl_loss"] == unmasked["kl_loss"] != 0
    assert masked["kl"] == unmasked["kl"]


@given(steps(), objectives())
def test_zero_advantage_gives_zero_policy_gradient(inputs, chosen):
    still = replace(inputs, advantages=torch.zeros_like(inputs.advantages), kept=torch.ones_like(inputs.kept))
    loss, gradient = loss_and_gradient(still, replace(chosen, kl=None))
    assert loss == 0
    assert not gradient.any()


@given(steps(), objectives())
def test_equal_policies_have_ratio_one_and_no_kl(inputs, chosen):
    same = inputs.rollout_logprobs
    metrics = compute_loss(
        replace(inputs, logprobs=same.clone().requires_grad_(), old_logprobs=same, reference_logprobs=same), chosen
    ).metrics.values()
    for name in ("ratio", "ratio_min", "ratio_max", "importance_ratio", "importance_weight"):
        assert metrics[name] == 1
    for name in ("kl", "kl_loss", "mismatch_kl", "clip_fraction"):
        assert metrics[name] == 0


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
def test_tokens_of_masked_sequences_count_in_the_denominator(name, aggregation):
    """Were they left out, the kept sequences' losses would be divided by less."""
    inputs = step((3, 1, 4, 2))
    masked = replace(inputs, kept=torch.tensor([True, False, True, False]))
    dropped = replace(masked, advantages=inputs.advantages * torch.tensor([1.0, 0.0, 1.0, 0.0]))
    dropped = replace(dropped, kept=torch.ones(4, dtype=torch.bool))
    chosen = objective(name, aggregation=aggregation)
    assert compute_loss(masked, chosen).loss == compute_loss(dropped, chosen).loss != 0


@pytest.mark.parametrize(
    ("aggregation", "divisor"),
    [("token_mean", [10] * 4), ("sequence_mean", [12, 4, 16, 8]), ("fixed_length", [32] * 4)],
)
def test_gradient_at_equal_policies_is_the_advantage_over_the_divisor(aggregation, divisor):
    inputs = step((3, 1, 4, 2), max_length=8)
    inputs = replace(inputs, old_logprobs=inputs.logprobs.detach(), kept=torch.ones(4, dtype=torch.bool))
    _, gradient = loss_and_gradient(inputs, objective("grpo", aggregation=aggregation))
    expected = -(inputs.advantages / torch.tensor(divisor))[inputs.sequence_ids]
    torch.testing.assert_close(gradient, expected, **EXACT)


def test_a_wholly_masked_micro_batch_still_has_a_gradient_of_zeros():
    """Backward must run on every rank, or the others wait for it."""
    inputs = step()
    loss, gradient = loss_and_gradient(replace(inputs, kept=torch.zeros(4, dtype=torch.bool)), objective())
    assert loss == 0
    assert not gradient.any()


def test_float32_follows_float64():
    inputs = step((5, 7, 3), seed=3)
    single = replace(
        inputs,
        **{
            name: getattr(inputs, name).detach().float()
            for name in ("logprobs", "old_logprobs", "rollout_logprobs", "reference_logprobs", "advantages")
        },
    )
    chosen = objective(importance="token_truncate", kl=KlPenalty(coef=0.1))
    narrow, wide = compute_loss(single, chosen).loss, compute_loss(inputs, chosen).loss
    assert narrow.dtype == torch.float32
    assert narrow.item() == pytest.approx(wide.item(), rel=1e-5)
