"""`trivet config`: what the configuration is after the environment and --set, with every default."""

import typer
import yaml

from services.cli.shared.output import plain_console
from services.cli.shared.start import ConfigFile, Overrides, load
from services.common.config import all_overrides
from services.common.secrets import hidden

config = typer.Typer(name="config", no_args_is_help=True, help="Inspect a run's configuration.")


@config.callback()
def _group() -> None:
    """With one command alone, typer would leave its name out."""


@config.command()
def show(config_file: ConfigFile, overrides: Overrides = None) -> None:
    """Print the whole configuration in effect as YAML, with every default; secrets are hidden."""
    loaded = load(plain_console(), config_file, all_overrides(overrides))
    typer.echo(yaml.safe_dump(hidden(loaded.dump()), sort_keys=False, allow_unicode=True), nl=False)
