"""What rank 0 reports to Prometheus. The metrics are the process's own, so tests look at what changes."""

import time

import pytest
from prometheus_client import REGISTRY
from trivet.v1 import trainer_pb2

from services.trainer.steps.observe import observe_checkpoint, observe_evaluation, observe_start, observe_step
from services.trainer.steps.status import Controls
from tests.support.trainer.plain_engine import update_configuration


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"trivet_trainer_{name}", labels)


@pytest.mark.parametrize(
    ("reward", "lowest", "highest"),
    [
        ({"minimum": -2.0, "maximum": 3.0}, -2, 3),
        ({"minimum": -2.0, "maximum": 3.0, "normalize": True}, 0, 1),
    ],
)
def test_what_alerts_compare_with_comes_from_the_configuration(reward, lowest, highest):
    config = update_configuration(
        reward=reward,
        trainer={"steps": 70, "max_staleness": 2, "checkpoint_every": 7, "optimizer": {"max_grad_norm": 0.5}},
    )
    observe_start(config, Controls())
    assert value("steps_planned") == 70
    assert value("staleness_limit_versions") == 2
    assert value("checkpoint_interval_steps") == 7
    assert value("grad_norm_limit") == 0.5
    assert (value("reward_range", bound="lowest"), value("reward_range", bound="highest")) == (lowest, highest)
    assert abs(time.time() - value("step_timestamp_seconds")) < 60


def test_a_pause_shows_at_once():
    controls = Controls()
    observe_start(update_configuration(), controls)
    assert value("paused") == 0
    controls.pause()
    assert value("paused") == 1
    controls.resume()
    assert value("paused") == 0


def test_a_step_moves_counters_and_gauges():
    before = {name: value(name) for name in ("groups_trained_total", "tokens_total", "step_seconds_sum")}
    observe_step(12, 4, {"loss": 0.25, "tokens": 300.0, "step_seconds": 2.5, "step_applied": 1.0})
    assert value("step") == 12
    assert value("loss") == 0.25
    assert value("groups_trained_total") - before["groups_trained_total"] == 4
    assert value("tokens_total") - before["tokens_total"] == 300
    assert value("step_seconds_sum") - before["step_seconds_sum"] == 2.5
    assert abs(time.time() - value("step_timestamp_seconds")) < 60


def test_an_evaluation_and_a_checkpoint_show():
    observe_evaluation({"greedy_accuracy": 0.5, "sampled_accuracy": 0.25, "failures": 1.0})
    assert value("evaluation_accuracy_ratio", decoding="greedy") == 0.5
    assert value("evaluation_accuracy_ratio", decoding="sampled") == 0.25
    assert value("evaluation_failures") == 1
    observe_checkpoint(trainer_pb2.Checkpoint(step=20, saved_at=1_700_000_000.0, size=4096))
    assert value("step") == 20
    assert value("checkpoint_step") == 20
    assert value("checkpoint_timestamp_seconds") == 1_700_000_000
    assert value("checkpoint_bytes") == 4096
