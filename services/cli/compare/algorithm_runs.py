"""One run for each algorithm: the same start, data and seeds, through `trivet up`."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from services.common.config import Config, load_config, overrides_by_algorithm, overrides_environment
from services.common.run_files.algorithm_switch import algorithm_overrides
from services.common.secrets import hidden_override
from services.common.serving.signals import ending_signals


@dataclass(frozen=True)
class AlgorithmRun:
    algorithm: str
    config: Config
    # What makes it out of the file.
    overrides: tuple[str, ...]

    @property
    def path(self) -> Path:
        return self.config.run.path


def plan_runs(
    config_file: Path, algorithms: Sequence[str], overrides: Sequence[str], overrides_for: Sequence[str]
) -> list[AlgorithmRun]:
    """`overrides` hold for all of them; each of `overrides_for` is "algorithm:section.key=value".

    Raises ConfigError for a configuration that one of them refuses, and for overrides of one that is not among them.
    """
    base = load_config(config_file, list(overrides))
    own = overrides_by_algorithm(overrides_for, algorithms)
    runs = []
    for name in algorithms:
        settings = (
            *overrides,
            *algorithm_overrides(base, name),
            f"run.name={base.run.name}-{_slug(name)}",
            *own[name],
        )
        runs.append(AlgorithmRun(name, load_config(config_file, list(settings)), settings))
    return runs


def train(config_file: Path, run: AlgorithmRun, fresh: bool) -> int:
    """The exit status of its `trivet up`, which shows its progress on the terminal.

    It has a session of its own; an interrupt is handed on to it, so that it leaves a checkpoint.
    """
    command = [sys.executable, "-m", "services.cli", "up", str(config_file), *(["--fresh"] if fresh else [])]
    secret = [override for override in run.overrides if hidden_override(override) != override]
    for override in run.overrides:
        if override not in secret:
            command += ["--set", override]
    environment = {**os.environ, **overrides_environment(secret)}
    process = subprocess.Popen(command, start_new_session=True, env=environment)

    def hand_on(number: int, _: FrameType | None) -> None:
        if process.poll() is None:
            process.send_signal(number)

    before = {number: signal.signal(number, hand_on) for number in ending_signals()}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _slug(algorithm: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", algorithm.lower()).strip("-")
