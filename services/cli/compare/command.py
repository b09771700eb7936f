"""`trivet compare`: algorithms side by side, on recorded batches or in a training run of each."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.cli.compare.algorithm_runs import AlgorithmRun, plan_runs, train
from services.cli.compare.curves import curve_table, plot_curves, summarize_run
from services.cli.compare.plot import plot_comparison
from services.cli.compare.table import compare_tables
from services.cli.shared.output import plain_console, say
from services.cli.shared.start import Overrides, load, measuring, prepare
from services.cli.shared.trainer_module import TrainerModule
from services.common.config import ConfigError, all_overrides, overrides_environment
from services.common.config.overrides import HELP, METAVAR, OVERRIDES_FOR_VARIABLE
from services.common.exit_codes import FAILED, FINISHED, INTERRUPTED
from services.common.run_files.atomic import write_atomically
from services.common.run_files.compare_report import CompareReport
from services.common.run_files.recorded_steps import chosen_steps
from services.common.run_files.run_log import RunLog
from services.common.secrets import hidden_override

MODULE = "services.trainer.compare"


def compare(
    algorithms: Annotated[str, typer.Option(help="names separated by commas, such as grpo,gspo,dapo")],
    run: Annotated[Path | None, typer.Argument(help="a run's directory with recorded steps")] = None,
    steps: Annotated[list[int] | None, typer.Argument(help="steps to compare; by default all")] = None,
    train_config: Annotated[
        Path | None,
        typer.Option(
            "--train", metavar="FILE", help="train each algorithm with this YAML instead, and plot the curves"
        ),
    ] = None,
    overrides: Overrides = None,
    overrides_for: Annotated[
        list[str] | None,
        typer.Option("--set-for", metavar=f"ALGORITHM:{METAVAR}", help=f"for one of them: {HELP}"),
    ] = None,
    fresh: Annotated[
        bool, typer.Option(help="with --train: discard earlier runs of these names instead of resuming them")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the picture; the numbers go into a JSON file next to it")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="with RUN: seconds for all steps")] = 3600,
) -> None:
    """Compare algorithms: on the same batches and rewards, or from the same start, data and seeds.

    With RUN: loss terms, gradients, and shares masked or clipped, on recorded steps, without an update.
    With --train: a complete training run of each, one after the other.

    Status 0: done. 1: a training failed. 2: nothing was compared. 130: interrupted.
    """
    console = plain_console()
    names = [name.strip() for name in algorithms.split(",") if name.strip()]
    settings, settings_for = all_overrides(overrides), overrides_for or []
    deadline = time.monotonic() + timeout
    with measuring(console):
        _check(names, run, train_config)
        if run is not None:
            code = _compare(console, run, steps or [], names, settings, settings_for, output, deadline)
        else:
            assert train_config is not None
            code = _train(console, train_config, names, settings, settings_for, fresh, output)
    raise typer.Exit(code)


def _check(names: list[str], run: Path | None, train_config: Path | None) -> None:
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--algorithms is {','.join(names)!r}, expected different names, separated by commas")
    if (run is None) == (train_config is None):
        given = "neither is given" if run is None else "both are given"
        raise ConfigError(f"{given}, expected either RUN (recorded steps) or --train FILE")


def _compare(
    console: Console,
    run: Path,
    steps: list[int],
    names: list[str],
    overrides: list[str],
    overrides_for: list[str],
    output: Path | None,
    deadline: float,
) -> int:
    output = output or run / "compare.png"
    chosen = chosen_steps(run, steps)
    arguments = [str(run), *(str(step) for step in steps), "--algorithms", ",".join(names)]
    module = TrainerModule(
        MODULE,
        arguments,
        run / "logs" / "compare.log",
        threads=chosen[0].record.environment.get("threads", "1"),
        environment=overrides_environment(overrides_for, OVERRIDES_FOR_VARIABLE),
        overrides=overrides,
    )
    report = module.report(CompareReport, output.with_suffix(".json"), deadline)
    for table in compare_tables(report):
        console.print(table)
    plot_comparison(report, output)
    _say_where(console, output)
    return FINISHED


def _train(
    console: Console,
    config_file: Path,
    names: list[str],
    overrides: list[str],
    overrides_for: list[str],
    fresh: bool,
    output: Path | None,
) -> int:
    base = load(console, config_file, overrides)
    # All are read before the first one trains: a wrong setting of the last one would show too late.
    runs = plan_runs(config_file, names, overrides, overrides_for)
    prepare(console, base)
    output = output or base.run.directory / f"{base.run.name}-algorithms.png"
    statuses: dict[str, int] = {}
    for run in runs:
        console.rule(f"{run.algorithm}: {run.path}")
        statuses[run.algorithm] = train(config_file, run, fresh)
        if statuses[run.algorithm] == INTERRUPTED:
            break
    _show_runs(console, [run for run in runs if run.algorithm in statuses], statuses, output)
    if INTERRUPTED in statuses.values():
        return INTERRUPTED
    return FAILED if any(statuses.values()) else FINISHED


def _show_runs(console: Console, runs: list[AlgorithmRun], statuses: dict[str, int], output: Path) -> None:
    run_logs = {run.algorithm: RunLog(run.path) for run in runs}
    console.print(curve_table(run_logs))
    plot_curves(run_logs, output)
    numbers = {
        run.algorithm: {
            "run": str(run.path),
            "status": statuses[run.algorithm],
            "overrides": [hidden_override(override) for override in run.overrides],
            **summarize_run(run_logs[run.algorithm]),
        }
        for run in runs
    }
    write_atomically(output.with_suffix(".json"), json.dumps(numbers, indent=1) + "\n")
    _say_where(console, output)
    for name, status in statuses.items():
        if status not in (FINISHED, INTERRUPTED):
            say(console, f"✗ the training with {name} ended with status {status}", style="red")


def _say_where(console: Console, output: Path) -> None:
    for name, path in (("plot   ", output), ("numbers", output.with_suffix(".json"))):
        say(console, f"{name}  {path}")
