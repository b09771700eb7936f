from typing import Annotated

import typer

from services.cli.audit.command import audit
from services.cli.check.command import check
from services.cli.compare.command import compare
from services.cli.config import config
from services.cli.init import init
from services.cli.rerun.command import rerun
from services.cli.shared.version import version_lines
from services.cli.up.command import up
from services.common.serving.signals import dump_stacks_on_signal, interrupt_on_signals

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(init)
app.command()(check)
app.add_typer(config)
app.command()(audit)
app.command()(rerun)
app.command()(compare)
app.command()(up)


def _say_version(wanted: bool) -> None:
    if wanted:
        for line in version_lines():
            typer.echo(line)
        raise typer.Exit


@app.callback()
def trivet(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="versions of Trivet, vLLM, torch and DeepSpeed"
        ),
    ] = False,
) -> None:
    """An RL post-training stack for LLMs, built to stay stable at scale."""
    dump_stacks_on_signal()
    interrupt_on_signals()
