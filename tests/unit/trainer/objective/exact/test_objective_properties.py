"""What holds for every algorithm, aggregation, correction and estimator."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.objective import QUANTILES, KlPenalty, compute_loss
from tests.support.trainer.objective_batches import (
    LEAVES,
    PER_TOKEN,
    REWARD_ALGORITHMS,
    divided_steps,
    objective,
    objectives,
    step,
    steps,
)

EXACT = {"rtol": 1e-11, "atol": 1e-13}


def loss_and_gradient(inputs, chosen):
    """The gradient is [N, 3]: by log-probabilities, values and entropies."""
    loss = compute_loss(inputs, chosen).loss
    leaves = [getattr(inputs, name) for name in LEAVES]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return loss.detach(), torch.stack(gradients, dim=1)


def opened(inputs):
    """Nothing masked."""
    return replace(inputs, kept=torch.ones_like(inputs.kept), truncated=torch.zeros_like(inputs.kept))


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


@given(steps(), objectives())
def test_quantiles_are_in_order_and_between_the_extremes(inputs, chosen):
    metrics = compute_loss(inputs, chosen).metrics.values()
    for ratio in ("policy_ratio", "importance_ratio"):
        found = [metrics[f"{ratio}_{name}"] for name in ("min", *QUANTILES, "max")]
        assert found == sorted(found)


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
        **{name: getattr(inputs, name).detach()[order].requires_grad_(name in LEAVES) for name in PER_TOKEN},
        sequence_ids=inputs.sequence_ids[order],
    )
    loss, gradient = loss_and_gradient(inputs, chosen)
    shuffled_loss, shuffled_gradient = loss_and_gradient(shuffled, chosen)
    torch.testing.assert_close(shuffled_loss, loss, **EXACT)
    torch.testing.assert_close(shuffled_gradient, gradient[order], **EXACT)


@given(steps(), objectives())
def test_masks_take_the_policy_gradient_of_their_sequences_and_touch_no_other(inputs, chosen):
    chosen = replace(chosen, kl=None)
    _, open_gradient = loss_and_gradient(opened(inputs), chosen)
    _, gradient = loss_and_gradient(inputs, chosen)
    kept = (inputs.kept & ~inputs.truncated)[inputs.sequence_ids]
    assert torch.equal(gradient[kept], open_gradient[kept])
    assert not gradient[~kept, 0].any()
    assert torch.equal(gradient[:, 1:], open_gradient[:, 1:])


@given(steps(), objectives())
def test_masks_leave_the_other_terms_alone(inputs, chosen):
    masked, unmasked = (compute_loss(each, chosen).metrics.values() for each in (inputs, opened(inputs)))
    assert masked["kl_loss"] != 0
    for name in masked.keys() - {"loss", "policy_loss", "masked_fraction", "truncated_fraction"}:
        assert masked[name] == unmasked[name], name


@given(steps(), objectives())
def test_truncated_sequences_are_masked_as_the_others(inputs, chosen):
    none = torch.zeros_like(inputs.truncated)
    truncated, kept = replace(inputs, kept=~none), replace(inputs, kept=~inputs.truncated, truncated=None)
    assert compute_loss(truncated, chosen).loss == compute_loss(kept, chosen).loss
    metrics = compute_loss(truncated, chosen).metrics.values()
    assert metrics["truncated_fraction"] == inputs.truncated.double().mean()
    assert metrics["masked_fraction"] == 0
    assert "truncated_fraction" not in compute_loss(kept, chosen).metrics.values()


@given(steps(), objectives())
def test_loss_is_the_sum_of_the_terms_that_are_logged(inputs, chosen):
    outputs = compute_loss(inputs, chosen)
    terms = {name: outputs.metrics.values()[name] for name in outputs.metrics.totals if name != "loss"}
    assert outputs.loss.item() == pytest.approx(sum(terms.values()), rel=1e-12, abs=1e-13)
    assert ("value_loss" in terms) == (chosen.algorithm.value is not None)
    assert ("entropy_loss" in terms) == (chosen.algorithm.entropy_coef > 0)


@given(steps(), objectives())
def test_zero_advantage_gives_zero_policy_gradient(inputs, chosen):
    still = replace(
        opened(inputs),
        advantages=torch.zeros_like(inputs.advantages),
        gae_advantages=torch.zeros_like(inputs.gae_advantages),
    )
    chosen = replace(chosen, kl=None)
    _, gradient = loss_and_gradient(still, chosen)
    assert compute_loss(still, chosen).metrics.values()["policy_loss"] == 0
    assert not gradient[:, 0].any()


@given(steps(), objectives())
def test_equal_policies_have_ratio_one_and_no_kl(inputs, chosen):
    same = inputs.rollout_logprobs
    metrics = compute_loss(
        replace(inputs, logprobs=same.clone().requires_grad_(), old_logprobs=same, reference_logprobs=same), chosen
    ).metrics.values()
    for ratio in ("policy_ratio", "importance_ratio"):
        assert {metrics[name] for name in (ratio, f"{ratio}_min", f"{ratio}_max")} == {1}
        assert {metrics[f"{ratio}_{name}"] for name in QUANTILES} == {1}
    assert metrics["importance_weight"] == pytest.approx(metrics.get("importance_calibration", 1), rel=1e-12)
    for name in ("kl", "kl_loss", "mismatch_kl", "clip_fraction"):
        assert metrics[name] == 0


@pytest.mark.parametrize("name", REWARD_ALGORITHMS)
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
def test_tokens_of_masked_sequences_count_in_the_denominator(name, aggregation):
    """Were they left out, the kept sequences' losses would be divided by less."""
    inputs = step((3, 1, 4, 2))
    masked = replace(
        inputs, kept=torch.tensor([True, False, True, True]), truncated=torch.tensor([False, False, False, True])
    )
    share = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    dropped = replace(
        opened(inputs),
        advantages=inputs.advantages * share,
        gae_advantages=inputs.gae_advantages * share[inputs.sequence_ids],
    )
    chosen = objective(name, aggregation=aggregation)
    assert compute_loss(masked, chosen).loss == compute_loss(dropped, chosen).loss != 0


@pytest.mark.parametrize(
    ("aggregation", "divisor"),
    [("token_mean", [10] * 4), ("sequence_mean", [12, 4, 16, 8]), ("fixed_length", [32] * 4)],
)
def test_gradient_at_equal_policies_is_the_advantage_over_the_divisor(aggregation, divisor):
    inputs = step((3, 1, 4, 2), max_length=8)
    inputs = replace(opened(inputs), old_logprobs=inputs.logprobs.detach())
    _, gradient = loss_and_gradient(inputs, objective("grpo", aggregation=aggregation))
    expected = -(inputs.advantages / torch.tensor(divisor))[inputs.sequence_ids]
    torch.testing.assert_close(gradient[:, 0], expected, **EXACT)


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
        **{name: getattr(inputs, name).detach().float() for name in (*PER_TOKEN, "advantages")},
    )
    chosen = objective("ppo", importance="token_truncate", kl=KlPenalty(coef=0.1), entropy_coef=0.1)
    narrow, wide = compute_loss(single, chosen).loss, compute_loss(inputs, chosen).loss
    assert narrow.dtype == torch.float32
    assert narrow.item() == pytest.approx(wide.item(), rel=1e-5)
