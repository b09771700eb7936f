import json
import math

import pytest

from services.common.errors import InvalidData
from services.common.run_files.recorded_steps import RECORD_FILE, consecutive_steps, write_order
from services.trainer.rerun.rerunner import Rerunner, changes, compare_metrics
from services.trainer.update.open import open_updater
from tests.support.trainer.recorded_run import make_order, open_plain, record_run


@pytest.fixture
def run(tmp_path):
    return record_run(tmp_path, steps=3)


def rerun(run, first, last, overrides=(), saved_by="plain"):
    steps = consecutive_steps(run, first, last)
    config = steps[0].config(list(overrides))
    started = config.model_copy(deep=True)
    started.model.path = str(steps[0].policy)
    engine = open_plain(started, saved_by)
    return Rerunner(config, overrides, engine, open_updater(config, engine, None)).rerun(steps)


@pytest.mark.parametrize(("first", "last"), [(1, 1), (2, 2), (1, 3)])
def test_recorded_steps_come_out_again_bit_for_bit(run, first, last):
    report = rerun(run, first, last)
    assert [step.step for step in report.steps] == list(range(first, last + 1))
    assert (report.start, report.warnings) == ("engine", ())
    for step in report.steps:
        assert (step.starts_alike, step.ends_alike) == (True, True)
        assert len(step.metrics) > 10
        assert all(pair.equal and pair.absolute == 0 for pair in step.metrics)


def test_a_step_recorded_under_the_names_of_before_comes_out_again(run):
    file = consecutive_steps(run, 2, 2)[0].path / RECORD_FILE
    record = json.loads(file.read_text(encoding="utf-8"))
    old = {"policy_ratio": "ratio", "policy_ratio_p99": "ratio_p99", "candidate_set_size": "candidates_mean"}
    assert "policy_ratio" in record["metrics"]
    record["metrics"] = {old.get(name, name): value for name, value in record["metrics"].items()}
    record["metrics"]["masked_sequence_ratio"] = record["metrics"]["masked_fraction"]
    file.write_text(json.dumps(record), encoding="utf-8")
    (step,) = rerun(run, 2, 2).steps
    assert [pair.name for pair in step.metrics if not pair.equal] == []


def test_another_input_shows(run):
    write_order(consecutive_steps(run, 2, 2)[0].path, make_order(2, [1.0, 0.0, 1.0, 0.0]))
    (step,) = rerun(run, 2, 2).steps
    assert (step.starts_alike, step.ends_alike) == (True, False)
    different = {pair.name for pair in step.metrics if not pair.equal}
    assert {"loss", "grad_norm"} <= different


def test_under_other_settings_the_first_step_starts_from_its_policy(run):
    """Smaller micro-batches: the same sums in another order."""
    report = rerun(run, 1, 3, ("trainer.tokens_per_microbatch=16",), saved_by="another")
    assert (report.start, report.exact) == ("policy", False)
    worst = max(pair.scaled for step in report.steps for pair in step.metrics)
    assert 0 < worst < 1e-5


def test_a_step_with_optimizer_state_needs_an_engine_that_can_load_it(run):
    with pytest.raises(InvalidData, match=r"saved by plain.*step 2 has optimizer state \(1 steps applied\)"):
        rerun(run, 2, 2, ("trainer.tokens_per_microbatch=16",), saved_by="another")


def test_digests_of_other_ranks_or_stages_are_not_compared(run):
    (step,) = rerun(run, 1, 1, ("trainer.zero_stage=3",)).steps
    assert (step.starts_alike, step.ends_alike) == (None, None)
    assert len(step.metrics) > 10
    assert all(pair.equal for pair in step.metrics)


def test_values_are_compared_by_their_bits():
    recorded = {"same": 0.1, "next": 0.1, "nan": math.nan, "zero": 0.0, "gone": 1.0}
    now = {"same": 0.1, "next": math.nextafter(0.1, 1), "nan": math.nan, "zero": -0.0, "new": 2.0}
    found = compare_metrics({name: value.hex() for name, value in recorded.items()}, now)
    pairs = {pair.name: pair for pair in found}
    assert {name for name, pair in pairs.items() if pair.equal} == {"same", "nan"}
    assert 0 < pairs["next"].absolute < 1e-16
    assert pairs["zero"].absolute == pairs["zero"].relative == 0
    assert pairs["gone"].absolute == pairs["gone"].scaled == math.inf
    assert pairs["new"].recorded is None


def test_what_changed_since_is_reported():
    before, now = {"torch": "2.13", "code": "a", "reference": "f"}, {"torch": "2.14", "code": "a", "threads": "1"}
    assert list(changes(before, now)) == [
        "reference is none, recorded with f",
        "threads is 1, recorded with none",
        "torch is 2.14, recorded with 2.13",
    ]
