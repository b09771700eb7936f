"""Files of a run, as versions before have written them."""

import math
from pathlib import Path

import pytest

from services.common.run_files.compare_report import CompareReport
from services.common.run_files.recorded_steps import StepRecord
from services.common.run_files.report import Report
from services.common.run_files.rerun_report import RerunReport

BEFORE = Path(__file__).parent / "before"


def test_a_record_that_calls_step_metrics_values():
    record = StepRecord.read(BEFORE / "record.json")
    assert len(record.metrics) == 11
    assert float.fromhex(record.metrics["loss"]) == pytest.approx(math.log(2))


def test_a_rerun_that_calls_step_metrics_values():
    report = RerunReport.read(BEFORE / "rerun.json")
    assert report.names == ["grad_norm", "loss"]
    assert all(pair.equal for _, pair in report.pairs("loss"))


def test_a_comparison_that_calls_step_metrics_values():
    report = CompareReport.read(BEFORE / "compare.json")
    assert report.mean("grad_norm", 0) == 0.5
    assert report.mean("loss", 1) is None


@pytest.mark.parametrize(("kind", "name"), [(StepRecord, "record"), (RerunReport, "rerun"), (CompareReport, "compare")])
def test_they_are_written_under_the_names_of_today(tmp_path, kind: type[Report], name):
    written = tmp_path / "report.json"
    before = kind.read(BEFORE / f"{name}.json")
    before.write(written)
    text = written.read_text(encoding="utf-8")
    assert '"metrics": ' in text
    assert '"values"' not in text
    assert repr(kind.read(written)) == repr(before)
