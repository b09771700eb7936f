"""`trivet audit`: do sampler and trainer agree under equal weights?

Starts a rollout of its own, or uses a running one. The trainer makes the comparison (services.trainer.audit); this
module starts it and prints the result and the verdict.
"""

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.cli.audit.processes import measure, own_rollout
from services.cli.audit.table import tables
from services.cli.audit.verdict import DEFAULTS, Thresholds, failures
from services.cli.shared.output import plain_console, say, say_verdict
from services.cli.shared.start import ConfigFile, Overrides, load, measuring, prepare
from services.common.config import Config, all_overrides
from services.common.exit_codes import NO_VERDICT
from services.common.run_files.audit_report import AuditReport

TOKEN_VARIABLE = "TRIVET_TOKEN"  # noqa: S105


def audit(
    config_file: ConfigFile,
    overrides: Overrides = None,
    rollout: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="a running rollout; without it, one is started")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(envvar=TOKEN_VARIABLE, help="of the running rollout; other users can read command-line arguments"),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="how many to draw, in whole groups")] = 64,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the report as JSON; by default audit.json of the run")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="seconds for the whole audit")] = 1800,
    max_difference: Annotated[float | None, typer.Option(min=0, help="largest |Δ log-prob| of a token")] = None,
    ratio_error: Annotated[float | None, typer.Option(min=0, help="largest |mean ratio − 1|")] = None,
    max_kl: Annotated[float | None, typer.Option(min=0, help="upper limit of the mismatch KL")] = None,
    min_agreement: Annotated[
        float | None, typer.Option(min=0, max=1, help="lowest routing agreement of an MoE layer")
    ] = None,
) -> None:
    """Sample, recompute under equal weights, and measure how far sampler and trainer differ.

    Status 0: within the thresholds (defaults depend on model.dtype). 1: not. 2: no verdict.
    """
    console = plain_console()
    settings = all_overrides(overrides)
    config = load(console, config_file, settings)
    limits = _limits(config, max_difference, ratio_error, max_kl, min_agreement)
    deadline = time.monotonic() + timeout
    output = output or config.run.path / "audit.json"
    with measuring(console, "no verdict: "):
        if rollout is None:
            _prepare(console, config)
            say(console, "starting a rollout …")
        with nullcontext(rollout) if rollout else own_rollout(config, config_file, settings, deadline) as address:
            report = measure(
                config,
                config_file,
                settings,
                rollout=address,
                samples=samples,
                output=output,
                deadline=deadline,
                # Empty: the configuration's own.
                environment={TOKEN_VARIABLE: (token or "") if rollout else ""},
            )
    raise typer.Exit(show(console, report, limits, output))


def show(console: Console, report: AuditReport, limits: Thresholds, output: Path) -> int:
    """Prints tables and verdict; returns the exit status."""
    say(
        console,
        f"{report.run}: {report.model_type} {report.dtype}, version {report.weights_version} "
        f"({report.weights_fingerprint or 'no fingerprint'}) of {report.rollout_id}, {report.samples} samples",
    )
    if report.groups_left_out:
        say(console, f"{report.groups_left_out} groups left out: new weights arrived while they were drawn")
    for table in tables(report):
        console.print(table)
    status = say_verdict(console, failures(report, limits), "sampler and trainer agree")
    say(console, f"report  {output}")
    return status


def _prepare(console: Console, config: Config) -> None:
    try:
        prepare(console, config)
    except typer.Exit as ended:
        raise typer.Exit(NO_VERDICT) from ended


def _limits(
    config: Config,
    max_difference: float | None,
    ratio_error: float | None,
    max_kl: float | None,
    min_agreement: float | None,
) -> Thresholds:
    given = {
        "difference_max": max_difference,
        "ratio_error": ratio_error,
        "mismatch_kl": max_kl,
        "agreement": min_agreement,
    }
    return replace(DEFAULTS[config.model.dtype], **{name: value for name, value in given.items() if value is not None})
