import typer

from services.cli.audit import audit
from services.cli.compare import compare
from services.cli.replay import replay
from services.cli.up import up
from services.common.signals import tell_stacks

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(audit)
app.command()(replay)
app.command()(compare)
app.command()(up)


@app.callback()
def trivet() -> None:
    """Reinforcement-learning post-training for language models that stays stable while it scales."""
    tell_stacks()
