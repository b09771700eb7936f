"""PPO's four terms against NumPy, and what the engine has to deliver for them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.trainer.objective import KlPenalty, ValueLoss, compute_loss
from services.trainer.objective.value import value_term
from tests.support.trainer.objective_batches import LEAVES, objective, step

VALUES = torch.tensor([-1.0, -0.1, 0.1, 1.0], dtype=torch.float64)


def term_and_gradient(target, clip):
    """Old values are 0, so that the values themselves say how far they moved."""
    values = VALUES.clone().requires_grad_()
    term = value_term(values, torch.zeros_like(VALUES), torch.full_like(VALUES, target), clip)
    (gradient,) = torch.autograd.grad(term.loss.sum(), values)
    return term, gradient.tolist()


def test_a_value_that_went_far_enough_towards_its_return_learns_no_more():
    term, gradient = term_and_gradient(target=2.0, clip=0.2)
    assert term.loss.tolist() == pytest.approx([4.5, 2.205, 1.805, 1.62])
    assert gradient == pytest.approx([-3, -2.1, -1.9, 0])
    assert term.clipped.tolist() == [False, False, False, True]


def test_without_clip_it_is_half_the_squared_error():
    term, gradient = term_and_gradient(target=2.0, clip=0.0)
    assert term.loss.tolist() == pytest.approx([4.5, 2.205, 1.805, 0.5])
    assert gradient == pytest.approx([-3, -2.1, -1.9, -1])
    assert not term.clipped.any()


def test_returns_and_old_values_are_constants():
    moving = [torch.zeros(1, requires_grad=True) for _ in range(3)]
    term = value_term(*moving[:1], *moving[1:], clip=0.2)
    gradients = torch.autograd.grad(term.loss.sum(), moving, allow_unused=True)
    assert [gradient is None for gradient in gradients] == [False, True, True]


@pytest.mark.parametrize("arguments", [(-0.1, 0.2), (0.5, -0.2), (float("nan"), 0.2), (0.5, float("nan"))])
def test_bad_value_loss_is_refused(arguments):
    with pytest.raises(ValueError, match=r"value_(coef|clip) is (-0\.\d|nan), expected 0 or more"):
        ValueLoss(*arguments)


def reference(inputs, *, value_coef, value_clip, entropy_coef, kl_coef):
    """Token by token; k1 for the KL."""
    arrays = {name: getattr(inputs, name).detach().numpy() for name in vars(inputs) if name not in SIZES}
    policy = value = entropy = kl = 0.0
    for token, sequence in enumerate(arrays["sequence_ids"]):
        at = {name: array[token] for name, array in arrays.items() if len(array) == inputs.total_tokens}
        if arrays["kept"][sequence] and not arrays["truncated"][sequence]:
            ratio = np.exp(at["logprobs"] - at["old_logprobs"])
            advantage = at["gae_advantages"]
            policy -= min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
        moved = min(max(at["values"] - at["old_values"], -value_clip), value_clip)
        bounded = at["old_values"] + moved
        value += 0.5 * max((at["values"] - at["returns"]) ** 2, (bounded - at["returns"]) ** 2)
        entropy += at["entropies"]
        kl += at["logprobs"] - at["reference_logprobs"]
    shares = {"policy_loss": policy, "value_loss": value_coef * value, "entropy_loss": -entropy_coef * entropy}
    return {name: total / inputs.total_tokens for name, total in (shares | {"kl_loss": kl_coef * kl}).items()}


SIZES = {"total_tokens", "total_sequences", "max_length", "steps_applied", "lengths"}


@pytest.mark.parametrize("seed", range(4))
def test_terms_follow_the_reference(seed):
    inputs = step((5, 3, 6, 1), seed=seed)
    chosen = objective("ppo", value_coef=0.7, value_clip=0.2, entropy_coef=0.03, kl=KlPenalty("k1", coef=0.1))
    outputs = compute_loss(inputs, chosen)
    expected = reference(inputs, value_coef=0.7, value_clip=0.2, entropy_coef=0.03, kl_coef=0.1)
    found = outputs.metrics.values()
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert outputs.loss.item() == pytest.approx(sum(expected.values()), rel=1e-12)


def test_each_leaf_learns_from_its_own_term():
    inputs = step()
    outputs = compute_loss(inputs, objective("ppo", entropy_coef=0.1))
    gradients = dict(zip(LEAVES, torch.autograd.grad(outputs.loss, [getattr(inputs, n) for n in LEAVES]), strict=True))
    assert gradients["entropies"].tolist() == pytest.approx([-0.1 / 10] * 10)
    alone = value_term(inputs.values, inputs.old_values, inputs.returns, 0.2).loss.sum() * 0.5 / 10
    torch.testing.assert_close(gradients["values"], torch.autograd.grad(alone, inputs.values)[0])


def test_metrics_of_values_and_entropy():
    inputs = step()
    found = compute_loss(inputs, objective("ppo", entropy_coef=0.1)).metrics.values()
    assert found["value"] == pytest.approx(inputs.values.mean().item())
    assert found["return"] == pytest.approx(inputs.returns.mean().item())
    assert found["entropy"] == pytest.approx(inputs.entropies.mean().item())
    clipped = value_term(inputs.values, inputs.old_values, inputs.returns, 0.2).clipped
    assert found["value_clip_fraction"] == clipped.double().mean()
    assert 0 < found["value_clip_fraction"] < 1


@pytest.mark.parametrize("name", ["values", "old_values", "returns", "gae_advantages", "entropies"])
def test_what_the_engine_did_not_deliver_is_named(name):
    with pytest.raises(ValueError, match=f"^{name} is missing, expected"):
        compute_loss(replace(step(), **{name: None}), objective("ppo", entropy_coef=0.1))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_no_other_algorithm_needs_them(name):
    bare = replace(
        step(), values=None, old_values=None, returns=None, gae_advantages=None, entropies=None, steps_applied=None
    )
    assert compute_loss(bare, objective(name)).loss == compute_loss(step(), objective(name)).loss


def test_entropies_without_gradient_are_refused():
    with pytest.raises(ValueError, match="entropies carries no gradient"):
        compute_loss(replace(step(), entropies=step().entropies.detach()), objective(entropy_coef=0.1))


def test_evaluation_without_gradient_is_allowed():
    chosen = objective("ppo", entropy_coef=0.1)
    still = replace(step(), **{name: getattr(step(), name).detach() for name in LEAVES})
    assert compute_loss(still, chosen).loss == compute_loss(step(), chosen).loss
