"""`trivet up`: a whole run on this machine, watched until its end."""

import shlex
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.cli.check.command import refuse_problems
from services.cli.shared.output import plain_console, say
from services.cli.shared.start import ConfigFile, Overrides, load, prepare
from services.cli.up.live import View
from services.cli.up.observation import Observer, observing
from services.cli.up.progress import SavedStep, is_finished, newest_checkpoint
from services.cli.up.report import damaged_lines, doubts, held_out_lines, plot, summary_table
from services.cli.up.run_lock import LOCK_FILE, RunTaken, refuse_taken, run_lock
from services.cli.up.supervisor import RunFailed, Supervisor
from services.common.config import Config, all_overrides
from services.common.errors import one_sentence
from services.common.exit_codes import FAILED, FINISHED, INTERRUPTED, NEVER_RESTARTED
from services.common.run_files.run_log import RunLog
from services.common.secrets import hidden_override
from services.common.serving.signals import on_signals

POLL_SECONDS = 0.2


def up(
    config_file: ConfigFile,
    overrides: Overrides = None,
    fresh: Annotated[bool, typer.Option(help="discard an earlier run of the same name instead of resuming it")] = False,
) -> None:
    """Run rollouts, rewards and trainer on this machine; Ctrl-C leaves a checkpoint to resume from."""
    console = plain_console()
    settings = all_overrides(overrides)
    config = load(console, config_file, settings)
    try:
        refuse_taken(config.run.path)
        if fresh or not is_finished(config):
            refuse_problems(console, config)
        with run_lock(config.run.path) as lock:
            if fresh:
                _forget(config.run.path)
            elif is_finished(config):
                _report_finished(console, config)
                return
            if prepare(console, config):
                # Only now are model and data there.
                refuse_problems(console, config)
            code = _Run(console, config, config_file, settings, lock).run()
    except RunTaken as error:
        say(console, str(error), style="red")
        raise typer.Exit(FAILED) from error
    except OSError as error:
        say(console, f"failed: {one_sentence(error)}", style="red")
        raise typer.Exit(FAILED) from error
    raise typer.Exit(code)


class _Run:
    def __init__(
        self, console: Console, config: Config, config_file: Path, overrides: Sequence[str], lock: int
    ) -> None:
        self._console, self._config = console, config
        self._supervisor = Supervisor(config, config_file, list(overrides), report=self._say, lock=lock)
        self._command = shlex.join(
            ["trivet", "up", str(config_file)]
            + [word for override in overrides for word in ("--set", hidden_override(override))]
        )
        self._stop, self._hurry = threading.Event(), threading.Event()
        self._started = time.time()

    def run(self) -> int:
        """The exit status. Prints the reason of a failure first, then what there is of the run."""
        on_signals(lambda _: (self._hurry if self._stop.is_set() else self._stop).set())
        failure: RunFailed | None = None
        finished = False
        try:
            self._supervisor.start(self._stop)
            finished = self._watch()
        except RunFailed as error:
            failure = error
            self._say(f"failed: {error}", style="red")
        finally:
            self._stop.set()
            self._supervisor.stop(self._hurry)
        saved = newest_checkpoint(self._config.run.path)
        _report(self._console, self._config, saved, time.time() - self._started)
        if finished:
            return FINISHED
        trained = max((entry["step"] for entry in RunLog(self._config.run.path).steps()), default=0)
        self._say(_left(saved, self._started, trained, failed=failure is not None))
        if failure is not None and failure.status in NEVER_RESTARTED:
            self._say("Started again as it is, it would end the same way: change what the reason names first.")
        self._say(f"Resume with: {self._command}")
        return INTERRUPTED if failure is None else failure.status

    def _watch(self) -> bool:
        """True when the run is finished, False when it was interrupted. Raises RunFailed."""
        if self._stop.is_set():
            return False
        run = self._config.run
        self._say(f"run {run.name} in {run.path}; logs in {run.path / 'logs'}")
        observer = Observer(self._supervisor, self._config)
        with View(self._console, run.name) as view, observing(observer, view.show):
            while not self._stop.wait(POLL_SECONDS):
                if self._supervisor.finished():
                    return True
        return False

    def _say(self, text: str, style: str | None = None) -> None:
        say(self._console, text, style)


def _forget(directory: Path) -> None:
    """All but the lock, which is held."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK_FILE:
            path.unlink()


def _report_finished(console: Console, config: Config) -> None:
    saved = newest_checkpoint(config.run.path)
    assert saved is not None
    _report(console, config, saved, None)
    say(
        console,
        f"run {config.run.name} is finished: its checkpoint holds step {saved.step}, and trainer.steps is "
        f"{config.trainer.steps}. Raise trainer.steps to continue, or start over with --fresh",
    )


def _left(saved: SavedStep | None, started: float, trained: int, *, failed: bool) -> str:
    """What the run ended with, as the disk has it; `trained` is the last recorded step."""
    ended = "Failed" if failed else "Stopped"
    if saved is None:
        return f"{ended}; no checkpoint was written: the run would start from the beginning"
    lost = f"; steps {saved.step + 1} to {trained} will be trained again" if trained > saved.step else ""
    if saved.saved_at < started:
        return f"{ended} without a new checkpoint: the newest one, of an earlier start, holds step {saved.step}{lost}"
    return f"{ended}; the newest checkpoint holds step {saved.step}{lost}: {saved.path}"


def _report(console: Console, config: Config, saved: SavedStep | None, seconds: float | None) -> None:
    run_log = RunLog(config.run.path)
    table = summary_table(run_log)
    if table is None:
        return
    console.print(table)
    for sentence in doubts(run_log.steps()[-1]["metrics"]):
        say(console, sentence, style="yellow")
    if seconds is not None:
        say(console, f"{seconds:.0f} s in all")
    picture = config.run.path / "plot.png"
    try:
        plot(run_log, picture)
        say(console, f"plot        {picture}")
    except OSError as error:
        say(console, f"plot        {picture} cannot be written ({error.strerror or error})", style="red")
    say(console, f"run log     {config.run.path / 'steps.jsonl'}, {config.run.path / 'evaluations.jsonl'}")
    if saved is not None:
        say(console, f"checkpoint  {saved.path}")
        say(console, f"policy      {saved.path / 'policy'} (loads in transformers and vLLM)")
    for line in damaged_lines(config.run.path):
        say(console, line, style="yellow")
    for line in held_out_lines(config.run.path, config.trainer.collapse.evaluation_share):
        say(console, line, style="yellow" if line.startswith("The run has ended") else None)
