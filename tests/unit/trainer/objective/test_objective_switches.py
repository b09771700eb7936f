"""Switching a mechanism off, or another one on, changes what it should and nothing else."""

import math
from dataclasses import replace

import pytest
import torch

from services.trainer.objective import Calibration, ImportanceCorrection, KlPenalty, Objective, compute_loss
from services.trainer.objective.importance import IMPORTANCE_MODES
from services.trainer.objective.kl import KL_ESTIMATORS
from tests.support.trainer.objective_batches import REWARD_ALGORITHMS, objective, step


def values(inputs, chosen):
    return compute_loss(inputs, chosen).metrics.values()


def changed(before, after):
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def full():
    return objective(importance="token_truncate", kl=KlPenalty(coef=0.1))


def calibrated(initial, decay_steps):
    correction = ImportanceCorrection("token_truncate", calibration=Calibration(initial, decay_steps))
    return replace(full(), importance=correction)


def test_calibration_multiplies_the_policy_loss_and_nothing_else():
    """At optimizer step 7, the one that `step` makes."""
    before, after = values(step(), full()), values(step(), calibrated(0.8, 10.0))
    factor = 0.8 * math.exp(-0.7)
    assert changed(before, after) == {"loss", "policy_loss", "importance_weight", "importance_calibration"}
    assert after["importance_calibration"] == pytest.approx(factor)
    for name in ("policy_loss", "importance_weight"):
        assert after[name] == pytest.approx(factor * before[name], rel=1e-12)


def test_calibration_above_one_waits_until_it_has_decayed():
    before, after = values(step(), full()), values(step(), calibrated(3.0, 10.0))
    assert after == before | {"importance_calibration": 1}


def test_calibration_without_a_step_is_refused():
    with pytest.raises(ValueError, match="steps_applied is missing, expected a number"):
        values(replace(step(), steps_applied=None), calibrated(1.0, 10.0))


def test_kl_off_leaves_the_policy_loss():
    without = replace(full(), kl=None)
    assert changed(values(step(), full()), values(step(), without)) == {"loss", "kl_loss", "kl"}
    assert values(step(), without)["loss"] == values(step(), full())["policy_loss"]


def test_no_reference_is_as_no_kl():
    assert values(replace(step(), reference_logprobs=None), full()) == values(step(), replace(full(), kl=None))


def test_mask_off_changes_only_the_policy_loss():
    opened = replace(step(), kept=torch.ones(4, dtype=torch.bool))
    assert changed(values(step(), full()), values(opened, full())) == {"loss", "policy_loss", "masked_fraction"}
    assert values(opened, full())["masked_fraction"] == 0


def test_importance_off_changes_only_the_policy_loss_and_its_weight():
    off = replace(full(), importance=ImportanceCorrection("none"))
    assert changed(values(step(), full()), values(step(), off)) == {"loss", "policy_loss", "importance_weight"}
    assert values(step(), off)["importance_weight"] == 1


def test_importance_is_one_where_the_old_policy_is_the_rollout():
    inputs = replace(step(), old_logprobs=step().rollout_logprobs)
    losses = [values(inputs, objective(importance=mode))["loss"] for mode in IMPORTANCE_MODES]
    assert losses == [losses[0]] * len(IMPORTANCE_MODES)


@pytest.mark.parametrize("mode", IMPORTANCE_MODES)
def test_importance_weights_carry_no_gradient(mode):
    """With old following current, the ratio is constant, so that only the weight could carry gradient."""
    inputs = step()
    logprobs = inputs.logprobs.detach().requires_grad_()
    term = compute_loss(replace(inputs, logprobs=logprobs, old_logprobs=logprobs), objective(importance=mode)).loss
    (gradient,) = torch.autograd.grad(term, logprobs)
    assert gradient.abs().max() < 1e-15


def test_every_switch_position_gives_its_own_loss():
    inputs = step((5, 3, 6, 4), seed=5)
    inputs = replace(inputs, kept=torch.ones(4, dtype=torch.bool), truncated=None)
    tight = {"clip_low": 0.01, "clip_high": 0.02}
    losses = [
        *(values(inputs, objective(name, **tight))["loss"] for name in REWARD_ALGORITHMS),
        *(values(inputs, objective(kl=KlPenalty(estimator, 0.1)))["loss"] for estimator in KL_ESTIMATORS),
        values(inputs, objective(kl=KlPenalty(coef=0.1, clip_ratio=1.01)))["loss"],
        values(inputs, objective(clip_low=0.05))["loss"],
        values(inputs, objective(clip_high=0.05))["loss"],
        values(inputs, objective(entropy_coef=0.1))["loss"],
        values(inputs, objective("ppo", value_coef=0.1))["loss"],
        values(inputs, objective("ppo", value_clip=0.1))["loss"],
        values(inputs, objective("ppo", value_clip=0.0))["loss"],
        values(step((5, 3, 6, 4), seed=5), objective())["loss"],
        *(values(inputs, calibrated(initial, steps))["loss"] for initial, steps in ((0.5, 10), (0.5, 20), (0.25, 10))),
    ]
    losses += [
        values(inputs, Objective(objective().algorithm, ImportanceCorrection(mode, 0.9, 1.1), None))["loss"]
        for mode in IMPORTANCE_MODES
    ]
    assert len(set(losses)) == len(losses)


def test_metrics_say_what_happened():
    inputs = replace(
        step((2, 2)),
        logprobs=torch.tensor([-1.0, -1.0, -2.0, -1.0], dtype=torch.float64),
        old_logprobs=torch.tensor([-1.5, -1.0, -1.0, -1.0], dtype=torch.float64),
        rollout_logprobs=torch.tensor([-2.5, -1.0, -1.0, -1.0], dtype=torch.float64),
        advantages=torch.tensor([1.0, -1.0], dtype=torch.float64),
        kept=torch.tensor([True, False]),
        truncated=None,
    )
    metrics = values(inputs, objective(importance="token_truncate"))
    up, down, mismatch = torch.tensor([0.5, -1.0, 1.0], dtype=torch.float64).exp().tolist()
    assert metrics["policy_ratio"] == pytest.approx((up + down + 2) / 4)
    assert (metrics["policy_ratio_min"], metrics["policy_ratio_max"]) == pytest.approx((down, up))
    quantiles = {name: metrics[f"policy_ratio_{name}"] for name in ("p1", "p50", "p99", "p999")}
    assert quantiles == pytest.approx({"p1": down, "p50": 1, "p99": up, "p999": up}, rel=0.008)
    assert metrics["clip_fraction"] == 0.5
    assert metrics["masked_fraction"] == 0.5
    assert metrics["importance_ratio_max"] == pytest.approx(mismatch)
    assert metrics["importance_ratio_p999"] == pytest.approx(mismatch, rel=0.008)
    assert metrics["importance_ratio_p50"] == metrics["importance_ratio_p1"] == 1
    assert metrics["importance_ratio"] == pytest.approx((mismatch + 3) / 4)
    assert metrics["importance_weight"] == pytest.approx((2 + 3) / 4)
    grown = torch.tensor(1.5, dtype=torch.float64).exp().item()
    assert metrics["mismatch_kl"] == pytest.approx(((grown - 1.5 - 1) + (down + 1 - 1)) / 4)
