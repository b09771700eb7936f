"""Steps written down so that they can be run again, written atomically."""

import shutil
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from trivet.v1 import step_pb2

from services.common.config import Config
from services.common.run_files.atomic import removed_on_failure
from services.common.run_files.lineage import config_version
from services.common.run_files.recorded_steps import (
    ENGINE_DIRECTORY,
    POLICY_DIRECTORY,
    RECORD_FILE,
    RECORDED_DIRECTORY,
    StepRecord,
    recorded_directories,
    step_directory,
    write_config,
    write_order,
)
from services.trainer.engine.protocol import TrainEngine
from services.trainer.metrics import counters
from services.trainer.metrics.step_metrics import StepMetrics
from services.trainer.recording.environment import environment


@dataclass(frozen=True)
class Begun:
    step: int
    order: step_pb2.StepOrder
    steps_applied: int
    digest: str


class Recorder:
    """Every rank has one and calls it: each writes its part of the engine's state, rank 0 the rest."""

    def __init__(self, config: Config, engine: TrainEngine) -> None:
        self._config, self._engine = config, engine
        # Absolute: ranks may be started in different directories.
        self._run = config.run.path.absolute()
        self._directory = self._run / RECORDED_DIRECTORY
        self._begun: Begun | None = None

    def due(self, step: int) -> bool:
        every = self._config.trainer.recording.every
        return every > 0 and (step - 1) % every == 0

    def begin(self, step: int, order: step_pb2.StepOrder) -> None:
        """Before the step: everything that it depends on."""
        staged = self._staging(step)
        if self._engine.rank == 0:
            self._clear(step)
            staged.mkdir(parents=True)
        self._engine.barrier()
        self._begun = Begun(step, order, self._engine.steps_applied, self._engine.state_digest())
        with removed_on_failure(staged, mine=self._engine.rank == 0):
            self._engine.export(staged / POLICY_DIRECTORY)
            self._engine.save(staged / ENGINE_DIRECTORY)

    def finish(self, metrics: StepMetrics) -> None:
        """After the step: its result. Only now does the recording become visible."""
        begun, self._begun = self._begun, None
        assert begun is not None
        digest = self._engine.state_digest()
        if self._engine.rank != 0:
            return
        staged = self._staging(begun.step)
        record = StepRecord(
            step=begun.step,
            run=self._config.run.name,
            config_version=config_version(self._config),
            world_size=self._engine.world_size,
            zero_stage=self._config.trainer.zero_stage,
            environment=self._environment,
            steps_applied=begun.steps_applied,
            digest_before=begun.digest,
            digest_after=digest,
            metrics={name: float(value).hex() for name, value in metrics.items()},
            groups=len(begun.order.groups),
            recorded_at=time.time(),
        )
        with removed_on_failure(staged, mine=True):
            write_order(staged, begun.order)
            write_config(staged, self._config)
            record.write(staged / RECORD_FILE)
        staged.rename(step_directory(self._directory, begun.step))
        for old in list(recorded_directories(self._run).values())[: -self._config.trainer.recording.keep]:
            shutil.rmtree(old)
        counters.STEPS_RECORDED.inc()

    @cached_property
    def _environment(self) -> dict[str, str]:
        return environment(self._config, self._engine.device)

    def _staging(self, step: int) -> Path:
        return self._directory / f"staging-{step:06d}"

    def _clear(self, step: int) -> None:
        """Removes what a crash left behind, and steps that resuming from an earlier one has voided."""
        for left_behind in self._directory.glob("staging-*"):
            shutil.rmtree(left_behind)
        for recorded, void in recorded_directories(self._run).items():
            if recorded >= step:
                shutil.rmtree(void)
