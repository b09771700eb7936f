"""Each value of a step has one metric, and only what a step reports has a series."""

from dataclasses import replace

import pytest
import torch
from prometheus_client import CollectorRegistry

from services.trainer.metrics.step_gauges import (
    DROPPED,
    EVALUATION_GAUGES,
    OTHER,
    OTHERS_KEPT,
    REPORTED_ELSEWHERE,
    STEP_GAUGES,
    StepMetricCollector,
)
from services.trainer.model.policy import Policy
from services.trainer.update.policy_update import PolicyUpdater
from services.trainer.update.preference_update import PreferenceUpdater
from services.trainer.update.reference import Reference
from tests.support.trainer.model_families import make_model, make_samples
from tests.support.trainer.plain_engine import DescentEngine, update_configuration

KNOWN = {value for gauge in STEP_GAUGES for value in gauge.labels} | REPORTED_ELSEWHERE.keys()
STABILITY = {
    "unbiased_kl": {"enabled": True, "coef": 0.01},
    "sequence_masking": {"enabled": True},
    "importance_sampling": {"mode": "token_truncate", "calibration": {"initial": 1.0, "decay_steps": 9}},
}


def collector() -> tuple[StepMetricCollector, CollectorRegistry]:
    made = StepMetricCollector(STEP_GAUGES, skip=REPORTED_ELSEWHERE, other=OTHER)
    registry = CollectorRegistry()
    registry.register(made)
    return made, registry


def samples():
    made = make_samples([(4, 5), (2, 3), (3, 4), (2, 4)], routing=(2, 4, 2), candidates=9)
    rewards = (1.0, 0.0, 0.5, 0.25)
    groups = ("a", "a", "b", "b")
    return [
        replace(sample, reward=reward, group_id=group)
        for sample, reward, group in zip(made, rewards, groups, strict=True)
    ]


def test_everything_that_a_step_with_all_mechanisms_reports_has_its_metric():
    policy = Policy(make_model("qwen3_moe"), value_head=True)
    reference = Reference(Policy(make_model("qwen3_moe")), torch.device("cpu"))
    algorithm = {"name": "ppo", "entropy_coef": 0.01, "mask_truncated": True, "old_policy": "recomputed"}
    config = update_configuration(algorithm=algorithm, rl_stability=STABILITY)
    reported = PolicyUpdater(config, DescentEngine(policy), reference).train(samples())
    assert {"value_loss", "kl", "routing_agreement", "candidate_set_size", "truncated_fraction"} <= reported.keys()
    assert reported.keys() - KNOWN == set()


def test_everything_that_a_step_on_preferences_reports_has_its_metric():
    policy = Policy(make_model("qwen3_moe"))
    reference = Reference(Policy(make_model("qwen3_moe")), torch.device("cpu"))
    config = update_configuration(algorithm={"name": "dpo"})
    updater = PreferenceUpdater(config, DescentEngine(policy), reference)
    assert updater.train(samples()).keys() - KNOWN == set()
    held_out = updater.evaluate(samples()).keys()
    assert held_out - {value for gauge in EVALUATION_GAUGES for value in gauge.labels} == set()


UNITS = ("", "_nats", "_ratio", "_tokens", "_versions")


@pytest.mark.parametrize("gauge", [*STEP_GAUGES, *EVALUATION_GAUGES], ids=lambda gauge: gauge.name)
def test_a_step_metric_has_the_name_of_its_gauge_without_prefix_and_unit(gauge):
    for name, label in gauge.labels.items():
        stem = name.removeprefix(f"{label}_") if gauge.label == "decoding" else name.removesuffix(f"_{label}")
        stem = f"evaluation_{stem}" if gauge in EVALUATION_GAUGES else stem
        assert gauge.name in {stem + unit for unit in UNITS}


def test_a_value_is_in_one_metric_only():
    named = [value for gauge in STEP_GAUGES for value in gauge.labels]
    assert len(named) == len(set(named))
    assert set(named).isdisjoint(REPORTED_ELSEWHERE)


def test_only_the_last_steps_values_have_series():
    made, registry = collector()
    made.set({"loss": 1.0, "kl": 0.5, "policy_ratio_p99": 1.2, "policy_ratio": 1.0})
    assert registry.get_sample_value("trivet_trainer_kl_nats") == 0.5
    assert registry.get_sample_value("trivet_trainer_policy_ratio", {"statistic": "p99"}) == 1.2
    assert registry.get_sample_value("trivet_trainer_policy_ratio", {"statistic": "mean"}) == 1.0
    assert registry.get_sample_value("trivet_trainer_policy_ratio", {"statistic": "max"}) is None
    made.set({"loss": 2.0})
    assert registry.get_sample_value("trivet_trainer_loss") == 2.0
    assert registry.get_sample_value("trivet_trainer_kl_nats") is None
    assert registry.get_sample_value("trivet_trainer_routing_agreement_ratio") is None


def test_values_of_the_runs_own_algorithm_are_kept_by_name_up_to_a_bound():
    made, registry = collector()
    before = DROPPED._value.get()
    own = {f"own_{index:03}": float(index) for index in range(OTHERS_KEPT + 3)}
    made.set({"loss": 1.0, "step_applied": 1.0, **own})
    assert registry.get_sample_value("trivet_trainer_other_metric", {"name": "own_000"}) == 0.0
    series = [
        sample for family in registry.collect() for sample in family.samples if family.name.endswith("other_metric")
    ]
    assert len(series) == OTHERS_KEPT
    assert DROPPED._value.get() - before == 3


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_shown_as_it_is(value):
    made, registry = collector()
    made.set({"grad_norm": value})
    assert str(registry.get_sample_value("trivet_trainer_grad_norm")) == str(value)
