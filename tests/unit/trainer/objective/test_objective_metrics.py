import math
from dataclasses import replace

import pytest
import torch

from services.trainer.objective import KlPenalty, compute_loss
from tests.support.trainer.objective_batches import objective, split, step

FAR = torch.tensor([70])


def metrics_of(inputs, kl=True):
    return compute_loss(inputs, objective(kl=KlPenalty(coef=0.1) if kl else None)).metrics


def across(ranks):
    """All-reduce among `ranks` that live in one process: each rank's vectors are seen first, then joined."""
    sent = {"sum": [], "min": [], "max": []}

    def send(vector, operation):
        sent[operation].append(vector)
        return vector

    for rank in ranks:
        rank.reduce(send)
    join = {"sum": torch.sum, "min": torch.amin, "max": torch.amax}
    return lambda vector, operation: join[operation](torch.stack(sent[operation]), dim=0)


def test_ranks_reduce_to_the_metrics_of_the_step():
    inputs = step((3, 1, 4, 2, 5))
    ranks = [metrics_of(part.inputs) for part in split(inputs, (4, 0, 3, 1, 2), (2, 3))]
    whole = metrics_of(inputs).values()
    for rank in ranks:
        assert rank.values() != pytest.approx(whole)
        assert rank.reduce(across(ranks)).values() == pytest.approx(whole, rel=1e-12)


def test_quantiles_of_a_step_are_those_of_all_its_ranks_not_of_one():
    """One token in a hundred is far off, and only one rank has it."""
    inputs = step((50, 50), max_length=50)
    inputs = replace(inputs, rollout_logprobs=inputs.old_logprobs.index_add(0, FAR, torch.tensor([-2.0]).double()))
    ranks = [metrics_of(part.inputs) for part in split(inputs, (0, 1), (1, 1))]
    found = ranks[0].reduce(across(ranks)).values()
    assert found["importance_ratio_p99"] == 1
    assert found["importance_ratio_p999"] == pytest.approx(math.exp(2), rel=0.02)
    assert found["importance_ratio_p999"] <= found["importance_ratio_max"] == pytest.approx(math.exp(2))
    assert ranks[0].values()["importance_ratio_p999"] == 1


def test_metrics_carry_no_gradient():
    metrics = metrics_of(step())
    for group in (metrics.totals, metrics.means, metrics.minima, metrics.maxima):
        assert not any(value.requires_grad for value in group.values())


def test_metrics_of_different_objectives_do_not_add_up():
    with pytest.raises(KeyError, match="metrics differ in \\['kl'\\]"):
        metrics_of(step()) + metrics_of(step(), kl=False)
