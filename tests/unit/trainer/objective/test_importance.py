import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.objective import Calibration, ImportanceCorrection
from services.trainer.objective.importance import importance_log_ratio, importance_weights

OLD = torch.tensor([2.0, 0.5, 4.0, 0.25]).log()
ROLLOUT = torch.zeros(4)
IDS = torch.tensor([0, 0, 1, 1])


def weights(mode, clip_min=None, cap=3.0):
    log_ratio = importance_log_ratio(OLD, ROLLOUT, IDS, 2, mode)
    found, logs = importance_weights(log_ratio, ImportanceCorrection(mode, clip_min, cap))
    torch.testing.assert_close(logs.exp(), found)
    return found.tolist()


@pytest.mark.parametrize(
    ("mode", "clip_min", "cap", "expected"),
    [
        ("none", None, 3.0, [1, 1, 1, 1]),
        ("token_truncate", None, 3.0, [2, 0.5, 3, 0.25]),
        ("token_truncate", 0.3, 3.0, [2, 0.5, 3, 0.3]),
        ("token_mask", None, 3.0, [2, 0.5, 0, 0.25]),
        ("token_mask", 0.3, 3.0, [2, 0.5, 0, 0]),
        ("sequence_truncate", None, 0.5, [0.5] * 4),
        ("sequence_mask", 0.5, 1.5, [1, 1, 1, 1]),
        ("sequence_mask", None, 0.5, [0, 0, 0, 0]),
    ],
)
def test_modes(mode, clip_min, cap, expected):
    assert weights(mode, clip_min, cap) == pytest.approx(expected)


def test_sequence_ratio_is_the_product_over_the_sequence():
    ids = torch.tensor([0, 1, 0, 1])
    ratio = importance_log_ratio(OLD, ROLLOUT, ids, 2, "sequence_mask").exp()
    assert ratio.tolist() == pytest.approx([8, 0.125, 8, 0.125])


def test_an_overflowing_ratio_is_capped_or_dropped():
    far = torch.tensor([400.0, 0.0])
    log_ratio = importance_log_ratio(far, torch.zeros(2), torch.tensor([0, 1]), 2, "token_truncate")
    assert importance_weights(log_ratio, ImportanceCorrection("token_truncate", cap=2.0))[0].tolist() == [2, 1]
    assert importance_weights(log_ratio, ImportanceCorrection("token_mask", cap=2.0))[0].tolist() == [0, 1]


def test_an_underflowing_ratio_keeps_its_logarithm():
    log_ratio = torch.tensor([-200.0, 0.0])
    found, logs = importance_weights(log_ratio, ImportanceCorrection("token_truncate", cap=2.0))
    assert (found.tolist(), logs.tolist()) == ([0, 1], [-200, 0])


@given(st.floats(0.1, 100), st.floats(0.5, 1e4), st.integers(0, 10_000))
def test_calibration_waits_at_one_and_then_loses_a_factor_e_every_decay_steps(initial, decay_steps, step):
    factor = Calibration(initial, decay_steps).factor
    assert 0 <= factor(step + 1) <= factor(step) <= 1
    if step > decay_steps * math.log(initial) + 1e-6:
        assert factor(step + 1) == pytest.approx(factor(step) * math.exp(-1 / decay_steps), rel=1e-9, abs=1e-300)
    elif step < decay_steps * math.log(initial) - 1e-6:
        assert factor(step) == 1


def test_calibration_starts_at_its_initial_value():
    assert Calibration(0.5, 10).factor(0) == 0.5
    assert Calibration(0.5, 10).factor(10) == pytest.approx(0.5 / math.e)


@pytest.mark.parametrize(
    ("initial", "decay_steps", "message"),
    [
        (0.0, 10, "calibration initial is 0.0"),
        (math.inf, 10, "calibration initial is inf"),
        (1.0, 0, "calibration decay_steps is 0, expected more than 0 and finite"),
        (1.0, math.nan, "calibration decay_steps is nan"),
    ],
)
def test_bad_calibration_is_refused(initial, decay_steps, message):
    with pytest.raises(ValueError, match=message):
        Calibration(initial, decay_steps)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("token",), "mode is 'token', expected one of none, token_truncate"),
        (("none", None, 0.0), "cap is 0.0"),
        (("none", None, math.nan), "cap is nan"),
        (("none", 2.0, 2.0), r"clip_min is 2.0, expected 0 or more and less than cap \(2.0\)"),
        (("none", -0.1, 2.0), "clip_min is -0.1"),
        (("none", None, 2.0, Calibration(1.0, 10)), "calibration is set while mode is none"),
    ],
)
def test_bad_correction_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ImportanceCorrection(*arguments)
