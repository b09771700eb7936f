"""`trivet rerun`: does a recorded step come out again?

The trainer runs the step (services.trainer.rerun); this module starts it and prints the result and the verdict.
"""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.cli.rerun.table import rerun_table
from services.cli.rerun.verdict import differences, outside
from services.cli.shared.output import plain_console, say, say_verdict
from services.cli.shared.start import Overrides, measuring
from services.cli.shared.trainer_module import TrainerModule
from services.common.config import all_overrides
from services.common.exit_codes import FINISHED
from services.common.run_files.recorded_steps import consecutive_steps
from services.common.run_files.rerun_report import RerunReport

MODULE = "services.trainer.rerun"


def rerun(
    run: Annotated[Path, typer.Argument(help="the run's directory, such as runs/quickstart")],
    step: Annotated[int, typer.Argument(min=1, help="the recorded step")],
    through: Annotated[
        int | None, typer.Option(metavar="STEP", help="continue through the recorded steps up to this one")
    ] = None,
    overrides: Overrides = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="with --set: largest difference of a metric, over max(1, |recorded|)"),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="NAME", help="check this step metric only; repeatable"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the report as JSON; by default rerun.json of the run")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="seconds for all steps")] = 3600,
) -> None:
    """Run recorded steps again and compare the results with the recording, bit for bit.

    With --set they run under other settings, and the differences are measured instead.

    Status 0: equal, or within the tolerance if one is given. 1: not. 2: no verdict.
    """
    console = plain_console()
    output = output or run / "rerun.json"
    with measuring(console, "no verdict: "):
        report = _measure(run, step, through, all_overrides(overrides), output, time.monotonic() + timeout)
    code = show(console, report, tolerance, metrics or [])
    say(console, f"report  {output}")
    raise typer.Exit(code)


def show(console: Console, report: RerunReport, tolerance: float | None, names: list[str]) -> int:
    """Prints table and verdict; returns the exit status."""
    say(console, _headline(report))
    for warning in report.warnings:
        say(console, f"! {warning}", style="yellow")
    console.print(rerun_table(report))
    if report.exact:
        found = differences(report)
        verdict = "every step metric and the whole training state, bit for bit"
    elif tolerance is not None:
        found = outside(report, tolerance, names)
        verdict = f"{', '.join(names) if names else 'every step metric'} within {tolerance:g}"
    else:
        say(console, "measured under other settings; pass --tolerance for a verdict")
        return FINISHED
    return say_verdict(console, found, verdict)


def _headline(report: RerunReport) -> str:
    start = {"engine": "the recorded state", "policy": "the recorded policy and a new optimizer"}[report.start]
    text = f"{report.run}: {_topology(report.recorded_world_size, report.recorded_zero_stage)}"
    if (report.world_size, report.zero_stage) != (report.recorded_world_size, report.recorded_zero_stage):
        text += f", rerun on {_topology(report.world_size, report.zero_stage)}"
    changed = f" with {' '.join(report.overrides)}" if report.overrides else ""
    return f"{text}; from {start}{changed}"


def _topology(ranks: int, stage: int) -> str:
    return f"{ranks} {'rank' if ranks == 1 else 'ranks'} under ZeRO-{stage}"


def _measure(
    run: Path, step: int, through: int | None, overrides: list[str], output: Path, deadline: float
) -> RerunReport:
    """Raises NoReport, ConfigError or InvalidData when there is nothing to compare."""
    first = consecutive_steps(run, step, through or step)[0]
    config = first.config(overrides)
    chosen = any(override.partition("=")[0] == "trainer.processes" for override in overrides)
    arguments = [str(run), str(step)]
    if through is not None:
        arguments += ["--through", str(through)]
    module = TrainerModule(
        MODULE,
        arguments,
        run / "logs" / "rerun.log",
        # Ranks of a run on several machines are more than its processes on each.
        ranks=config.trainer.processes if chosen else first.record.world_size,
        threads=first.record.environment.get("threads", "1"),
        overrides=overrides,
    )
    return module.report(RerunReport, output, deadline)
