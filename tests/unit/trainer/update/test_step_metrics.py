"""Metrics of a step are of all its optimizer steps; those of the first have names that say so."""

from dataclasses import replace

import pytest

from services.trainer.metrics.step_metrics import SAMPLER_AGAINST_TRAINER, split
from services.trainer.model.policy import Policy
from services.trainer.update.policy_update import PolicyUpdater
from tests.support.trainer.model_families import make_model, make_samples
from tests.support.trainer.plain_engine import DescentEngine, update_configuration

LENGTHS = [(4, 5), (2, 3), (6, 2), (1, 7), (3, 4)]
MASKING = {"sequence_masking": {"enabled": True, "divergence_threshold": 0.01, "min_keep_ratio": 0.2}}


def samples():
    made = make_samples(LENGTHS, routing=(2, 4, 2), candidates=9)
    return [replace(sample, advantage=(-1.0) ** index) for index, sample in enumerate(made)]


def train(chosen, rate, **trainer):
    engine = DescentEngine(Policy(make_model("qwen3_moe")), rate)
    config = update_configuration(algorithm={"aggregation": "token_mean"}, rl_stability=MASKING, trainer=trainer)
    return PolicyUpdater(config, engine, None).train(chosen)


def test_a_policy_that_does_not_move_says_the_same_however_the_batch_is_divided():
    whole, divided = train(samples(), 0.0), train(samples(), 0.0, minibatches=2, epochs=3)
    # The mask keeps its share of each optimizer step, and a gradient is of its mini-batch alone.
    own = {"grad_norm", "grad_norm_max", "masked_fraction", "loss", "policy_loss"}
    same = whole.keys() - own
    assert {name: divided[name] for name in same} == pytest.approx({name: whole[name] for name in same}, rel=1e-6)
    assert {
        "policy_ratio_p50",
        "policy_ratio_max",
        "sampler_ratio_mean",
        "routing_agreement",
        "entropy",
        "clip_fraction",
    } <= same
    assert divided["grad_norm"] <= divided["grad_norm_max"]


def test_a_step_of_one_optimizer_step_has_no_other_names():
    assert not [name for name in train(samples(), 0.1) if name.startswith("first_") or name == "grad_norm_max"]


def test_the_whole_step_and_its_first_optimizer_step():
    """With one mini-batch an epoch is an optimizer step, so the first step alone is a run with one epoch."""
    one, two, three = (train(samples(), 0.1, epochs=epochs) for epochs in (1, 2, 3))
    assert one["policy_ratio_max"] < two["policy_ratio_max"]
    for found in (two, three):
        for name in SAMPLER_AGAINST_TRAINER:
            assert found[f"first_{name}"] == one[name], name
    # Equal mini-batches: what an epoch adds to the mean is that epoch's.
    later = [2 * two["loss"] - one["loss"], 3 * three["loss"] - 2 * two["loss"]]
    assert three["loss"] == pytest.approx((one["loss"] + sum(later)) / 3)
    assert min(one["policy_ratio_min"], two["policy_ratio_min"]) >= three["policy_ratio_min"]
    norms = [one["grad_norm"], 2 * two["grad_norm"] - one["grad_norm"], 3 * three["grad_norm"] - 2 * two["grad_norm"]]
    assert three["grad_norm_max"] == pytest.approx(max(norms))
    assert three["clip_fraction"] != one["clip_fraction"]


def test_totals_and_means_are_weighted_by_tokens():
    chosen = samples()
    divided = train(chosen, 0.0, minibatches=2)
    parts = [train(part, 0.0) for part in split(chosen, 2)]
    sizes = [sum(len(sample.token_ids) for sample in part) for part in split(chosen, 2)]
    assert sizes[0] != sizes[1]
    for name in ("loss", "policy_ratio", "mismatch_kl", "entropy", "logprob_difference_mean"):
        expected = sum(size * part[name] for size, part in zip(sizes, parts, strict=True)) / sum(sizes)
        assert divided[name] == pytest.approx(expected), name
    assert divided["masked_fraction"] == pytest.approx(
        (3 * parts[0]["masked_fraction"] + 2 * parts[1]["masked_fraction"]) / 5
    )
    assert divided["grad_norm"] == pytest.approx((parts[0]["grad_norm"] + parts[1]["grad_norm"]) / 2)
    assert divided["policy_ratio_max"] == max(part["policy_ratio_max"] for part in parts)


@pytest.mark.parametrize(
    ("count", "parts", "sizes"),
    [
        (5, 4, [2, 1, 1, 1]),
        (7, 3, [3, 2, 2]),
        (8, 4, [2, 2, 2, 2]),
        (3, 2, [2, 1]),
        (4, 1, [4]),
        (2, 4, [1, 1]),
        (0, 2, []),
    ],
)
def test_a_batch_is_divided_into_the_promised_number_of_parts(count, parts, sizes):
    divided = split(range(count), parts)
    assert [len(part) for part in divided] == sizes
    assert [item for part in divided for item in part] == list(range(count))
