import importlib.util
import io
import math
import sys
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from services.cli.app import app
from services.cli.compare import command as compare_command
from services.cli.rerun import command as rerun_command
from services.cli.rerun.command import show
from services.cli.rerun.table import rerun_table
from services.cli.rerun.verdict import differences, outside
from services.cli.shared.trainer_module import NoReport, TrainerModule
from services.common.run_files.rerun_report import MetricPair, RerunReport, RerunStep


def pair(name: str, recorded: float | None, rerun: float | None) -> MetricPair:
    equal = recorded is not None and rerun is not None and recorded.hex() == rerun.hex()
    return MetricPair(name=name, recorded=recorded, rerun=rerun, equal=equal)


def step(number: int, *pairs: MetricPair, starts: bool | None = True, ends: bool | None = True) -> RerunStep:
    return RerunStep(step=number, starts_alike=starts, ends_alike=ends, metrics=pairs)


def report(*steps: RerunStep, overrides: tuple[str, ...] = ()) -> RerunReport:
    return RerunReport(
        run="quickstart",
        overrides=overrides,
        start="policy" if overrides else "engine",
        recorded_world_size=2,
        recorded_zero_stage=3,
        world_size=1 if overrides else 2,
        zero_stage=1 if overrides else 3,
        warnings=("torch is 2.14, recorded with 2.13",),
        steps=steps,
    )


EQUAL = report(step(3, pair("loss", 0.5, 0.5), pair("kl", math.nan, math.nan)))
OFF = report(
    step(3, pair("loss", 0.5, 0.5 + 1e-9), pair("tokens", 2000.0, 2000.1)),
    step(4, pair("loss", 0.5, 0.5 - 3e-9), pair("tokens", 2000.0, 2000.0)),
    overrides=("trainer.processes=1",),
)


def printed(found: RerunReport, tolerance: float | None = None, names: list[str] | None = None) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=100)
    code = show(console, found, tolerance, names or [])
    return code, console.file.getvalue()


def test_equality_is_the_verdict_where_nothing_was_changed():
    code, text = printed(EQUAL)
    assert code == 0
    assert "every step metric and the whole training state, bit for bit" in text
    assert "torch is 2.14, recorded with 2.13" in text


@pytest.mark.parametrize(
    ("changed", "reported"),
    [
        (step(3, pair("loss", 0.5, math.nextafter(0.5, 1)), pair("kl", 0.0, 0.0)), "1 of 2 metrics differ: loss"),
        (step(3, pair("loss", 0.5, None)), "1 of 1 metrics differ: loss"),
        (step(3, pair("loss", 0.5, 0.5), starts=False), "starts from another state"),
        (step(3, pair("loss", 0.5, 0.5), ends=False), "ends with another state"),
    ],
)
def test_the_smallest_difference_fails(changed, reported):
    (sentence,) = differences(report(changed))
    assert reported in sentence
    code, text = printed(report(changed))
    assert code == 1
    assert reported in text


def test_a_tolerance_scales_with_metrics_above_one():
    """2000 against 2000.1 is 5e-5 of its size; 0.5 against 0.5 - 3e-9 counts as it is."""
    assert outside(OFF, 1e-4, []) == []
    (loss,) = outside(OFF, 2e-9, ["loss"])
    assert "loss at step 4 is 0.499999997, recorded 0.5: off by 3e-09, expected at most 2e-09" in loss
    assert len(outside(OFF, 1e-9, [])) == 2
    assert printed(OFF, 1e-4)[0] == 0
    assert printed(OFF, 1e-5)[0] == 1
    assert printed(OFF, 1e-8, ["loss"])[0] == 0


def test_a_metric_on_one_side_only_or_not_finite_is_outside_any_tolerance():
    assert outside(report(step(1, pair("kl", 1.0, None)), overrides=("a.b=1",)), 1e9, []) != []
    assert outside(report(step(1, pair("kl", 1.0, math.inf)), overrides=("a.b=1",)), 1e9, []) != []
    (unknown,) = outside(OFF, 1.0, ["lozz"])
    assert "lozz is none of the step metrics, expected one of loss, tokens" in unknown


def test_without_a_tolerance_other_settings_give_no_verdict():
    code, text = printed(OFF)
    assert code == 0
    assert "pass --tolerance for a verdict" in text
    assert "2 ranks under ZeRO-3, rerun on 1 rank under ZeRO-1; from the recorded policy" in text


def test_the_table_shows_where_a_metric_is_furthest_off():
    console = Console(file=io.StringIO(), width=80)
    console.print(rerun_table(OFF))
    lines = {line.split()[0]: line.split() for line in console.file.getvalue().splitlines() if line.strip()}
    assert lines["loss"][1:5] == ["0/2", "3.0e-09", "6.0e-09", "4"]
    assert lines["tokens"][1:5] == ["1/2", "1.0e-01", "5.0e-05", "3"]
    assert "…" not in console.file.getvalue()


def test_a_run_without_recordings_has_no_verdict(tmp_path):
    for arguments in (["rerun", str(tmp_path), "1"], ["compare", "--algorithms", "grpo", str(tmp_path)]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2
        assert "has no recorded steps, expected some (trainer.recording.every)" in result.output


@pytest.mark.parametrize("name", [compare_command.MODULE, rerun_command.MODULE])
def test_the_modules_that_commands_start_exist(name):
    assert importlib.util.find_spec(f"{name}.__main__") is not None


def module(tmp_path, body: str) -> TrainerModule:
    (tmp_path / "spoken.py").write_text(body)
    return TrainerModule("spoken", [], tmp_path / "spoken.log")


@pytest.mark.parametrize(
    ("body", "seconds", "reported"),
    [
        (
            'print(\'{"event": "ended", "exit_code": 2, "reason": "no such step"}\\nnoise\'); raise SystemExit(2)',
            30,
            "no such step (status 2",
        ),
        ("print('[rank0]: KeyError: 3\\n=====') ; raise SystemExit(1)", 30, r"KeyError: 3 (status 1"),
        ("raise SystemExit(5)", 30, "it said nothing (status 5"),
        ("import time; print('waits', flush=True); time.sleep(60)", 0.5, "the time is up"),
    ],
)
def test_a_module_that_fails_says_why(tmp_path, monkeypatch, body, seconds, reported):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started = time.monotonic()
    with pytest.raises(NoReport) as failed:
        module(tmp_path, body).run(time.monotonic() + seconds)
    assert reported in str(failed.value)
    assert time.monotonic() - started < 10


def test_several_ranks_run_under_torchrun(tmp_path):
    command = TrainerModule("some.module", ["RUN", "3"], tmp_path / "log", ranks=2)._command()
    assert command[:5] == [sys.executable, "-m", "services.trainer.launch", "--nproc-per-node", "2"]
    assert command[-4:] == ["-m", "some.module", "RUN", "3"]
