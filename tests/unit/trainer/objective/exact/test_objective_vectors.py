"""The 24 cases that were computed independently, in NumPy, with gradients by central differences."""

import json
from pathlib import Path

import pytest
import torch

from services.trainer.objective import (
    ImportanceCorrection,
    KlPenalty,
    LossInputs,
    Objective,
    compute_loss,
    find_algorithm,
    keep_sequences,
    sequence_divergence,
)

CASES = json.loads(Path(__file__).with_name("vectors.json").read_text())


def label(case):
    parts = [case["algorithm"], case["aggregation"], case["kl"]["estimator"], case["importance_sampling"]["mode"]]
    return "-".join(str(part) for part in parts)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def objective_of(case):
    importance, kl = case["importance_sampling"], case["kl"]
    estimator = "importance_sampling_corrected" if kl["estimator"] == "unbiased" else kl["estimator"]
    return Objective(
        find_algorithm(case["algorithm"]).override(case["aggregation"], case["clip_low"], case["clip_high"]),
        ImportanceCorrection(importance["mode"] or "none", importance["clip_min"], importance["clip_max"]),
        KlPenalty(estimator, kl["coef"], kl["ratio_clip"]),
    )


def inputs_of(case):
    ids = torch.tensor(case["sequence_ids"])
    logprobs, rollout = tensor(case["logprobs"]).requires_grad_(), tensor(case["rollout_logprobs"])
    advantages = tensor(case["advantages"])
    masking = case["sequence_masking"]
    kept = torch.ones_like(advantages, dtype=torch.bool)
    if masking["enabled"]:
        divergence = sequence_divergence(logprobs, rollout, ids, len(advantages))
        kept = keep_sequences(advantages, divergence, masking["divergence_threshold"], masking["min_keep_ratio"])
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=tensor(case["old_logprobs"]),
        rollout_logprobs=rollout,
        reference_logprobs=tensor(case["ref_logprobs"]),
        sequence_ids=ids,
        advantages=advantages,
        kept=kept,
        total_tokens=len(ids),
        total_sequences=len(advantages),
        max_length=case["max_length"],
    )


def test_all_cases_are_here():
    assert len(CASES) == 24


@pytest.mark.parametrize("case", CASES, ids=label)
def test_case(case):
    inputs = inputs_of(case)
    outputs = compute_loss(inputs, objective_of(case))
    (gradient,) = torch.autograd.grad(outputs.loss, inputs.logprobs)
    expected = case["expected"]

    assert inputs.kept.tolist() == expected["keep"]
    torch.testing.assert_close(outputs.loss, tensor(expected["loss"]), rtol=1e-9, atol=0)
    expected_gradient = tensor(expected["grad_logprobs"])
    # The round-off of central differences does not shrink with an entry, so the smallest need an absolute allowance.
    round_off = 1e-9 * expected_gradient.abs().max().item()
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=round_off)
