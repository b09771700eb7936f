"""A run that loses a rollout, its trainer, its Redis and a checkpoint, and whose settings change while it is away."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from services.trainer.checkpoint.directory import Checkpoints
from tests.support.runs.quickstart_run import quickstart_tree
from tests.support.runs.running_system import System

TOKEN = "a-token-of-sixteen-or-more"
STEPS, GROUPS, SIZE, EVERY = 16, 8, 4, 2
# Groups of a step, and tokens of an answer, after the change.
THEN, MAX_TOKENS_THEN = 4, 8
# How long Redis is away: each service asks for it meanwhile, and has time left for what it does without.
OUTAGE_SECONDS = 10.0


@dataclass(frozen=True)
class Finished:
    """A run that ended, with its rollout 0 and its Redis still up."""

    system: System
    # Steps of the checkpoint that was damaged, and of the one before, with which the run resumed.
    damaged: int
    resumed: int

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.system.config.run.path / "checkpoints", keep=3)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [each for each in self.system.events("trainer") if each["event"] == name]


def disturbable(directory: Path, model: Path) -> System:
    """Not started yet."""
    tree = quickstart_tree(model)
    tree["sampling"]["group_size"] = SIZE
    tree["algorithm"] = {"name": "dr_grpo"}
    tree["rollout"]["server"] = {"token": TOKEN}
    tree["evaluation"] = {"every": 0, "prompts": 8, "samples": 2}
    tree["trainer"] |= {"steps": STEPS, "groups_per_step": GROUPS, "checkpoint_every": EVERY}
    return System(directory, tree)


def disturb(system: System) -> Finished:
    system.start("redis")
    system.until_redis()
    system.start("rollout-0", "rollout-1", "reward", "trainer")
    system.until_sampling("rollout-1")
    system.until_step(1)
    system.until_busy("rollout-1")
    system.kill("rollout-1")

    system.until_step(5)
    system.kill("trainer")
    system.start("trainer")
    system.until_step(9)
    assert system.running("trainer")

    system.kill("redis")
    time.sleep(OUTAGE_SECONDS)
    system.start("redis")
    system.until_redis()
    system.until_step(11)

    system.kill("trainer")
    damaged = _newest(system)
    _flip(system.config.run.path / "checkpoints" / f"step-{damaged:06}" / "policy" / "model.safetensors")
    tree = yaml.safe_load(system.file.read_text(encoding="utf-8"))
    tree["trainer"] |= {"groups_per_step": THEN, "max_staleness": 0}
    tree["sampling"]["max_tokens"] = MAX_TOKENS_THEN
    system.file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    system.start("trainer")
    system.until_finished()
    return Finished(system, damaged, damaged - EVERY)


def _newest(system: System) -> int:
    saved = Checkpoints(system.config.run.path / "checkpoints", keep=3).latest()
    assert saved is not None
    return saved.state.step


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
