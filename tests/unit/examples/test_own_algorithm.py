"""The example of an own algorithm, loaded as `algorithm.name` would and put through the whole objective."""

import pytest
import torch

from services.common.config import parse_config
from services.trainer.objective import (
    ImportanceCorrection,
    KlPenalty,
    LossInputs,
    Objective,
    compute_loss,
    find_algorithm,
)
from services.trainer.update.algorithm import configured_algorithm

NAME = "examples.own_algorithm:mixed_ratio"


def inputs(drift: torch.Tensor, advantages: torch.Tensor) -> LossInputs:
    rollout = torch.full_like(drift, -1.0)
    return LossInputs(
        logprobs=(rollout + drift).requires_grad_(),
        old_logprobs=rollout,
        rollout_logprobs=rollout,
        reference_logprobs=rollout,
        sequence_ids=torch.tensor([0, 0, 1, 1]),
        advantages=advantages,
        kept=torch.tensor([True, True]),
        total_tokens=4,
        total_sequences=2,
        max_length=8,
    )


def loss_of(batch: LossInputs) -> torch.Tensor:
    objective = Objective(find_algorithm(NAME), ImportanceCorrection(), KlPenalty(coef=0.0))
    return compute_loss(batch, objective).loss


def test_on_policy_it_is_grpo() -> None:
    batch = inputs(torch.zeros(4, dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64))
    loss_of(batch).backward()
    assert batch.logprobs.grad is not None
    assert batch.logprobs.grad.tolist() == pytest.approx([-0.25, -0.25, 0.25, 0.25])


def test_the_ratio_is_the_geometric_mean_of_token_and_sequence() -> None:
    drift = torch.tensor([0.08, -0.04, 0.0, 0.0], dtype=torch.float64)
    batch = inputs(drift, torch.tensor([1.0, 0.0], dtype=torch.float64))
    # The sequence's mean is 0.02: the tokens' log ratios are 0.05 and -0.01, inside the clip range.
    expected = -torch.tensor([0.05, -0.01], dtype=torch.float64).exp().mean() / 2
    assert loss_of(batch).item() == pytest.approx(expected.item(), rel=1e-12)


def test_a_sequence_that_has_moved_far_enough_is_clipped() -> None:
    batch = inputs(torch.full((4,), 0.5, dtype=torch.float64), torch.tensor([1.0, 1.0], dtype=torch.float64))
    loss = loss_of(batch)
    loss.backward()
    assert loss.item() == pytest.approx(-1.1)
    assert batch.logprobs.grad is not None
    assert not batch.logprobs.grad.any()


def test_the_configuration_names_it_and_replaces_its_defaults() -> None:
    config = parse_config(
        {
            "run": {"name": "own"},
            "model": {"path": "model"},
            "data": {"train": {"kind": "jsonl", "path": "train.jsonl"}},
            "reward": {"scorers": [{"name": "exact_match"}]},
            "algorithm": {"name": NAME, "clip_high": 0.3},
        }
    )
    found = configured_algorithm(config)
    assert (found.name, found.clip_low, found.clip_high) == ("mixed_ratio", 0.1, 0.3)
