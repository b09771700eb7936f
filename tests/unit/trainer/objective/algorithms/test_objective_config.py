"""The configuration's keys reach the objective, and left alone they change nothing."""

import pytest

from services.common.config import AlgorithmConfig, ConfigError, parse_config
from services.trainer.objective import Calibration, ImportanceCorrection, ValueLoss, find_algorithm
from services.trainer.update.algorithm import build_objective


def built(algorithm, importance=None):
    return build_objective(
        parse_config(
            {
                "run": {"name": "objective"},
                "model": {"path": "models/none", "max_length": 2048},
                "data": {"train": {"kind": "jsonl", "path": "train.jsonl"}},
                "reward": {"scorers": [{"name": "exact_match"}]},
                "algorithm": algorithm,
                "rl_stability": {"importance_sampling": importance or {}},
            }
        )
    )


def test_defaults_are_the_algorithms_own():
    for name in ("grpo", "ppo"):
        assert built({"name": name}).algorithm == find_algorithm(name)
    assert built({}).importance == ImportanceCorrection("token_truncate", None, 2.0, None)


def test_new_mechanisms_are_off_by_default():
    settings = AlgorithmConfig()
    assert (settings.overlong_buffer, settings.mask_truncated, settings.dynamic_sampling) == (0, False, None)


def test_value_and_entropy_settings_reach_the_algorithm():
    found = built({"name": "ppo", "value_coef": 0.1, "value_clip": 0.3, "entropy_coef": 0.02}).algorithm
    assert (found.value, found.entropy_coef) == (ValueLoss(coef=0.1, clip=0.3), 0.02)


def test_calibration_reaches_the_correction():
    found = built({}, {"calibration": {"initial": 2.0, "decay_steps": 100}})
    assert found.importance.calibration == Calibration(2.0, 100)


@pytest.mark.parametrize(
    ("importance", "message"),
    [
        ({"mode": "none", "calibration": {"initial": 1.0, "decay_steps": 10}}, "calibration is set while mode is none"),
        ({"calibration": {"initial": 0.0, "decay_steps": 10}}, "initial"),
        ({"calibration": {"initial": 1.0, "decay_steps": float("inf")}}, "decay_steps"),
        ({"calibration": {"initial": 1.0}}, "decay_steps"),
    ],
)
def test_bad_calibration_is_refused(importance, message):
    with pytest.raises(ConfigError, match=message):
        built({}, importance)


def test_value_settings_without_a_value_head_are_refused():
    with pytest.raises(ValueError, match="value_coef is 0.5, expected none: grpo has no value head"):
        built({"name": "grpo", "value_coef": 0.5})
