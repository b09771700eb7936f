import shutil
import threading
import time
from typing import Annotated

import typer
from rich.console import Console

from services.cli.audit import audit
from services.cli.compare import compare
from services.cli.live import View
from services.cli.observation import Observer, observing
from services.cli.replay import replay
from services.cli.report import plot, summary_table
from services.cli.start import EXIT_FAILED, EXIT_STOPPED, ConfigFile, Overrides, load, prepare
from services.cli.supervisor import RunFailed, Supervisor
from services.common.config import Config
from services.common.records import Records
from services.common.signals import on_signals, tell_stacks

POLL_SECONDS = 0.2

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command()(audit)
app.command()(replay)
app.command()(compare)


@app.callback()
def trivet() -> None:
    """An RL post-training stack for LLMs, built to stay stable at scale."""
    tell_stacks()


@app.command()
def up(
    config_file: ConfigFile,
    overrides: Overrides = None,
    fresh: Annotated[
        bool, typer.Option(help="forget an earlier run of the same name instead of going on with it")
    ] = False,
) -> None:
    """Run rollouts, rewards and trainer on this machine; Ctrl-C leaves a checkpoint to go on from."""
    console = Console()
    config = load(console, config_file, overrides or [])
    if fresh and config.run.path.exists():
        shutil.rmtree(config.run.path)
    prepare(console, config)
    stop, hurry = threading.Event(), threading.Event()

    def interrupt(_: int) -> None:
        (hurry if stop.is_set() else stop).set()

    on_signals(interrupt)
    started = time.monotonic()
    supervisor = Supervisor(config, config_file, overrides or [])
    failure = None
    finished = False
    try:
        supervisor.start()
        finished = _watch(console, config, supervisor, stop)
    except RunFailed as error:
        failure = error
    finally:
        if not finished:
            console.print("stopping …")
        supervisor.stop(hurry)
    _report(console, config, time.monotonic() - started)
    if failure is not None:
        console.print(f"[red]failed:[/] {failure}", markup=True, highlight=False)
        raise typer.Exit(EXIT_FAILED)
    if not finished:
        console.print(f"Stopped. Go on with: trivet up {config_file}")
        raise typer.Exit(EXIT_STOPPED)


def _watch(console: Console, config: Config, supervisor: Supervisor, stop: threading.Event) -> bool:
    """True when the run is finished, False when it was interrupted."""
    observer = Observer(supervisor, config.run.name)
    console.print(f"run {config.run.name} in {config.run.path}; logs in {config.run.path / 'logs'}")
    with View(console, config.run.name) as view, observing(observer, view.show):
        while not stop.wait(POLL_SECONDS):
            if supervisor.finished():
                return True
    return False


def _report(console: Console, config: Config, seconds: float) -> None:
    records = Records(config.run.path)
    table = summary_table(records)
    if table is None:
        return
    console.print(table)
    picture = config.run.path / "plot.png"
    plot(records, picture)
    checkpoints = sorted((config.run.path / "checkpoints").glob("step-*"))
    console.print(f"{seconds:.0f} s in all")
    console.print(f"plot        {picture}")
    console.print(f"records     {config.run.path / 'steps.jsonl'}, {config.run.path / 'evaluations.jsonl'}")
    if checkpoints:
        console.print(f"checkpoint  {checkpoints[-1]}")
        console.print(f"policy      {checkpoints[-1] / 'policy'} (loads in transformers and vLLM)")
