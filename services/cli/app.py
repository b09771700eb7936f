import typer

from services.cli.audit.command import audit
from services.cli.check import check
from services.cli.compare.command import compare
from services.cli.config import config
from services.cli.rerun.command import rerun
from services.cli.up.command import up
from services.common.serving.signals import dump_stacks_on_signal

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(check)
app.add_typer(config)
app.command()(audit)
app.command()(rerun)
app.command()(compare)
app.command()(up)


@app.callback()
def trivet() -> None:
    """An RL post-training stack for LLMs, built to stay stable at scale."""
    dump_stacks_on_signal()
