"""`trivet check`: what would keep a run from starting, all of it at once and before anything is started.

Each service looks at its own part (services.trainer.check, services.reward.check), in a process of its own.
Meanwhile this one looks at the machine.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import typer
from rich.console import Console

from services.cli.check.machine import machine_report
from services.cli.shared.output import plain_console, say, say_verdict
from services.cli.shared.start import ConfigFile, Overrides, load
from services.common.config import Config, all_overrides
from services.common.exit_codes import CONFIGURATION
from services.common.run_files.check_report import CheckReport
from services.common.run_files.lineage import without_addresses

TIMEOUT_SECONDS = 180.0


def check(config_file: ConfigFile, overrides: Overrides = None) -> None:
    """Report everything that would keep a run from starting on this machine; start nothing.

    Looks at keys, data, model files, algorithm, scorers (called on three rows), GPUs, ports, Redis and disk.
    Status 0: nothing found. 2: findings, each with the key to change.
    """
    console = plain_console()
    config = load(console, config_file, all_overrides(overrides))
    refuse_problems(console, config, starts=False)
    if config.prepare is not None and not config.prepare.done:
        say(console, f"not checked: model and data, which prepare.command has yet to make ({config.prepare.creates})")
    say_verdict(console, [], "nothing found that would keep the run from starting")


def refuse_problems(console: Console, config: Config, *, starts: bool = True) -> None:
    """Prints what is found and leaves with status 2; only warns, or does nothing, where the run could start."""
    reports = check_all(config, starts=starts)
    for report in reports:
        for sentence in report.findings:
            say(console, f"✗ {sentence}", style="red")
        for sentence in report.doubts:
            say(console, f"! {sentence}", style="yellow")
    if any(report.findings for report in reports):
        raise typer.Exit(CONFIGURATION)


def check_all(config: Config, *, starts: bool = True) -> list[CheckReport]:
    """`starts`: `trivet up` is about to."""
    services = ["trainer"] if config.data.preferences is not None else ["trainer", "reward"]
    with tempfile.TemporaryDirectory(prefix="trivet-check-") as directory:
        settings = Path(directory) / "config.yaml"
        # Nothing that is secret: a service reaches no other.
        tree = {**without_addresses(config), "prepare": config.dump()["prepare"]}
        settings.write_text(json.dumps(tree), encoding="utf-8")
        running = [_ServiceCheck(service, settings) for service in services]
        deadline = time.monotonic() + TIMEOUT_SECONDS
        try:
            machine = machine_report(config, starts=starts)
            return [*(one.report(deadline) for one in running), machine]
        finally:
            for one in running:
                one.end()


class _ServiceCheck:
    def __init__(self, service: str, settings: Path) -> None:
        self._service = service
        self._report, self._log = settings.with_name(f"{service}.json"), settings.with_name(f"{service}.log")
        # The settings are complete: the environment must not change them again.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TRIVET_")}
        command = [sys.executable, "-m", f"services.{service}.check", "--config", str(settings)]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, "--output", str(self._report)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**environment, "OMP_NUM_THREADS": "1"},
            )

    def report(self, deadline: float) -> CheckReport:
        try:
            status = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return _failed(f"the {self._service}'s check did not end within {TIMEOUT_SECONDS:.0f} s")
        if status == 0:
            return CheckReport.read(self._report)
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it said nothing"]
        return _failed(f"the {self._service}'s check ended with status {status}: {said[-1]}")

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def _failed(sentence: str) -> CheckReport:
    return CheckReport(findings=(sentence,))
