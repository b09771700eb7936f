"""What every command does first: read the configuration, and make what it needs."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.common.config import Config, ConfigError, load_config

EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED = 1, 2, 130

ConfigFile = Annotated[Path, typer.Argument(help="the run's YAML")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="override; repeatable")]


def load(console: Console, config_file: Path, overrides: list[str]) -> Config:
    try:
        return load_config(config_file, overrides)
    except ConfigError as error:
        console.print(str(error), style="red", highlight=False)
        raise typer.Exit(EXIT_USAGE) from error


def prepare(console: Console, config: Config) -> None:
    """Runs prepare.command unless what it creates is there already."""
    wanted = config.prepare
    if wanted is None or Path(wanted.creates).exists():
        return
    command = [sys.executable if wanted.command[0] == "python" else wanted.command[0], *wanted.command[1:]]
    console.print(f"preparing: {' '.join(wanted.command)}")
    ended = subprocess.run(command, check=False)
    if ended.returncode != 0 or not Path(wanted.creates).exists():
        console.print(f"[red]prepare.command ended with status {ended.returncode} and made no {wanted.creates}[/]")
        raise typer.Exit(EXIT_FAILED)
