"""What every command does first: read the configuration, and prepare what it needs."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.cli.shared.output import say
from services.cli.shared.trainer_module import NoReport
from services.common.config import Config, ConfigError, load_config
from services.common.config.overrides import HELP, METAVAR
from services.common.errors import InvalidData
from services.common.exit_codes import CONFIGURATION, FAILED, INTERRUPTED, NO_VERDICT

# How long prepare.command has to end when it is interrupted.
STOP_SECONDS = 5.0

ConfigFile = Annotated[Path, typer.Argument(help="the run's YAML")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar=METAVAR, help=HELP)]


def load(console: Console, config_file: Path, overrides: list[str]) -> Config:
    try:
        return load_config(config_file, overrides)
    except ConfigError as error:
        say(console, str(error), style="red")
        raise typer.Exit(CONFIGURATION) from error


def prepare(console: Console, config: Config) -> bool:
    """Runs prepare.command unless what it creates is there already; returns whether it ran."""
    wanted = config.prepare
    if wanted is None or wanted.done:
        return False
    command = [sys.executable if wanted.command[0] == "python" else wanted.command[0], *wanted.command[1:]]
    say(console, f"preparing: {' '.join(wanted.command)}")
    status = _run(command)
    if status != 0 or not Path(wanted.creates).exists():
        say(console, f"prepare.command ended with status {status} and made no {wanted.creates}", style="red")
        raise typer.Exit(FAILED)
    return True


def _run(command: Sequence[str]) -> int:
    """Its exit status. An interrupt ends all that it has started, too."""
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise


@contextmanager
def measuring(console: Console, otherwise: str = "") -> Iterator[None]:
    """Around what gives a report: leaves with NO_VERDICT and the reason, after the words `otherwise`, if none."""
    try:
        yield
    except (NoReport, ConfigError, InvalidData) as error:
        say(console, f"{otherwise}{error}", style="red")
        raise typer.Exit(NO_VERDICT) from error
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
