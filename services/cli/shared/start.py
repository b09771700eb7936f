"""What every command does first: read the configuration, and prepare what it needs."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.cli.shared.console import PlainConsole
from services.common.config import Config, ConfigError, load_config
from services.common.serving.arguments import inherited_overrides

EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED = 1, 2, 130
# How long prepare.command has to end when it is interrupted.
STOP_SECONDS = 5.0

ConfigFile = Annotated[Path, typer.Argument(help="the run's YAML")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="override; repeatable")]


def all_overrides(overrides: list[str] | None) -> list[str]:
    """Those of the command line after those of the environment."""
    return [*inherited_overrides(), *(overrides or [])]


def plain_console() -> Console:
    return PlainConsole()


def say(console: Console, text: str, style: str | None = None) -> None:
    """One line, however long."""
    console.print(text, style=style, markup=False, emoji=False, highlight=False, soft_wrap=True)


def load(console: Console, config_file: Path, overrides: list[str]) -> Config:
    try:
        return load_config(config_file, overrides)
    except ConfigError as error:
        say(console, str(error), style="red")
        raise typer.Exit(EXIT_USAGE) from error


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
        raise typer.Exit(EXIT_FAILED)
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
