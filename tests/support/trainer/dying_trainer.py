"""python -m tests.support.trainer.dying_trainer DIRECTORY STARTS LIMIT: trains on pairs with the plain engine.

The third pair takes the process with it, in the middle of its step. Started so often, one process after the other, it
prints the signal that ended each, 0 for none.
"""

import os
import signal
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from services.common.config import Config
from services.common.run_files.run_log import RunLog
from services.trainer.checkpoint.directory import Checkpoints
from services.trainer.data.preferences import PairRow, PreferenceData
from services.trainer.data.rows import RowSet
from services.trainer.engine.protocol import PolicyOutput
from services.trainer.loop import Machinery, RankZero, TrainingLoop
from services.trainer.model.policy import load_policy
from services.trainer.recording.recorder import Recorder
from services.trainer.steps.deaths import Deaths
from services.trainer.steps.pair_feed import PairFeed
from services.trainer.steps.status import Controls, Status
from services.trainer.update.open import open_updater
from services.trainer.update.reference import Reference
from tests.support.trainer.plain_engine import update_configuration
from tests.support.trainer.recorded_run import SavingEngine, make_base

PAIRS, DEADLY_TOKEN = 8, 95


class DyingEngine(SavingEngine):
    def forward(self, batch: Any, **options: Any) -> PolicyOutput:
        output = super().forward(batch, **options)
        if (batch.targets == DEADLY_TOKEN).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return output


def configuration(directory: Path) -> Config:
    return update_configuration(
        run={"name": "dying", "directory": str(directory)},
        data={"train": None, "preferences": {"kind": "jsonl", "path": "none.jsonl"}},
        algorithm={"name": "dpo"},
        model={"path": str(directory / "base")},
        trainer={"groups_per_step": 2, "steps": 3, "checkpoint_every": 1},
    )


def train(directory: Path, limit: int) -> None:
    config = configuration(directory)
    engine = DyingEngine(load_policy(config.model.path, dtype="float32"))
    updater = open_updater(config, engine, Reference(deepcopy(engine.policy), torch.device("cpu")))
    checkpoints = Checkpoints(config.run.path / "checkpoints", 3)
    rows = [PairRow(str(n), "", [3, 4], "", [n, DEADLY_TOKEN if n == 2 else 1], "", [7, 1]) for n in range(PAIRS)]
    data = PreferenceData(RowSet(rows, 1, False), RowSet(rows[-1:], 1, False), "data", 0)
    deaths = Deaths(config.run.path / "deaths.json", limit)
    feed = PairFeed(config, data, Status("dying", config.trainer.steps), Controls(), deaths)
    machinery = Machinery(engine, updater, checkpoints, Recorder(config, engine), "model", {})
    TrainingLoop(config, machinery, RankZero(feed, RunLog(config.run.path), None, deaths=deaths)).run()


def ended(directory: Path, limit: int) -> int:
    """In a process of its own, which need not import anything again."""
    if (child := os.fork()) == 0:
        train(directory, limit)
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    where = Path(sys.argv[1])
    make_base(where / "base")
    load_policy(str(where / "base"), dtype="float32")
    signals = [ended(where, int(sys.argv[3])) for _ in range(int(sys.argv[2]))]
    sys.stdout.write(f"{signals}\n")
