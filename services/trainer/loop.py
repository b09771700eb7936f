"""The training loop. Every rank runs it; rank 0 alone talks to Redis and decides what comes next."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
from trivet.v1 import step_pb2, trainer_pb2

from services.common.config import Config
from services.common.lineage import config_version
from services.common.logs import get_logger
from services.common.records import Records
from services.trainer import metrics
from services.trainer.checkpoint import (
    ENGINE_DIRECTORY,
    POLICY_DIRECTORY,
    Checkpoints,
    SavedCheckpoint,
    TrainerState,
    check_resumable,
    size_bytes,
)
from services.trainer.conductor import Conductor
from services.trainer.engine import TrainEngine
from services.trainer.groups import training_samples
from services.trainer.publication import Publisher
from services.trainer.rewards import advantages_in_groups, shaped_rewards
from services.trainer.samples import TrainSample
from services.trainer.summary import summarize
from services.trainer.update import Updater

log = get_logger(__name__)


class TrainingLoop:
    """`conductor`, `publisher` and `records` are rank 0's, None elsewhere."""

    def __init__(
        self,
        config: Config,
        engine: TrainEngine,
        updater: Updater,
        checkpoints: Checkpoints,
        *,
        model: str,
        conductor: Conductor | None,
        publisher: Publisher | None,
        records: Records | None,
    ) -> None:
        self._config, self._engine, self._updater, self._checkpoints = config, engine, updater, checkpoints
        self._model, self._conductor, self._publisher, self._records = model, conductor, publisher, records
        self._step = 0
        self._phases: dict[str, float] = {}
        self._evaluated: int | None = None

    def run(self) -> bool:
        """True when the last step is done, False when it was asked to stop before. Raises TrivetError."""
        self._start()
        self._publish()
        self._evaluate()
        self._phases = {}
        if self._conductor is not None:
            self._conductor.status.start_clock(self._step)
        while self._step < self._config.trainer.steps:
            order = self._next_order()
            if order.action == step_pb2.STEP_ACTION_TRAIN:
                self._train(order)
                self._publish()
                self._record(order)
                if self._due(self._config.trainer.checkpoint_every):
                    self._save()
                if self._due(self._config.evaluation.every):
                    self._evaluate()
            elif order.action == step_pb2.STEP_ACTION_SAVE:
                self._save()
            elif order.action == step_pb2.STEP_ACTION_STOP:
                self._save()
                return False
        self._save()
        self._evaluate()
        return not self._stopped()

    def _start(self) -> None:
        """Takes up the newest checkpoint, if there is one."""
        saved = self._checkpoints.latest()
        if saved is not None:
            data = self._conductor.data.version if self._conductor else saved.state.data
            check_resumable(saved, model=self._model, data=data, world_size=self._engine.world_size)
            self._engine.load(saved.engine)
            self._step = saved.state.step
            structlog.contextvars.bind_contextvars(step=self._step)
            log.info("resumed", checkpoint=str(saved.path))
        if self._conductor is None:
            return
        self._conductor.status.step = self._conductor.status.checkpoint_step = self._step
        if saved is not None:
            self._conductor.restore(saved.state)

    def _next_order(self) -> step_pb2.StepOrder:
        with self._phase("wait"):
            if self._conductor is None:
                return step_pb2.StepOrder.FromString(self._engine.broadcast_bytes(None))
            order = self._conductor.next_order()
            if self._engine.world_size > 1:
                self._engine.broadcast_bytes(order.SerializeToString())
            return order

    def _train(self, order: step_pb2.StepOrder) -> None:
        structlog.contextvars.bind_contextvars(step=self._step + 1)
        with self._phase("train"):
            self._values = self._updater.train(self._samples(order))
        self._step += 1
        if self._conductor is not None:
            self._conductor.step = self._step
        if not self._values["step_applied"]:
            metrics.STEPS_SKIPPED.inc()
            log.warning("step skipped: the gradient was not finite")

    def _samples(self, order: step_pb2.StepOrder) -> list[TrainSample]:
        rewards = shaped_rewards(order.groups, self._config)
        advantages = advantages_in_groups(rewards, self._config.algorithm.advantage_normalization)
        samples: list[TrainSample] = []
        for scored, reward, advantage in zip(order.groups, rewards, advantages, strict=True):
            samples += training_samples(
                scored,
                order.replay[len(samples) : len(samples) + len(reward)],
                self._engine.facts,
                rewards=reward,
                advantages=advantage,
                candidates_expected=self._config.sampling.truncates,
            )
        return samples

    def _publish(self) -> None:
        with self._phase("publish"), metrics.PUBLISH_SECONDS.time():
            staged = self._broadcast_path(self._publisher.staging() if self._publisher else None)
            self._engine.export(staged)
            if self._publisher is not None:
                self._publisher.publish(staged, self._step)
        if self._conductor is not None:
            # Before anything else, so that the rollouts have work while the rest is written down.
            self._conductor.issue()

    def _broadcast_path(self, path: Path | None) -> Path:
        return Path(self._engine.broadcast_bytes(None if path is None else str(path).encode()).decode())

    def _record(self, order: step_pb2.StepOrder) -> None:
        if self._conductor is None or self._records is None:
            return
        values = {**self._values, **summarize(order, self._step - 1, self._phases)}
        self._phases = {}
        status = self._conductor.status
        status.metrics, status.step = values, self._step
        metrics.STEP.set(self._step)
        metrics.GROUPS_TRAINED.inc(len(order.groups))
        for name, value in values.items():
            metrics.STEP_METRIC.labels(name).set(value)
        self._conductor.observe()
        self._records.add_step(
            {
                "step": self._step,
                "time": time.time(),
                "groups": [scored.group.prompt.group_id for scored in order.groups],
                "samples": [sample.sample_id for scored in order.groups for sample in scored.group.samples],
                "weights": sorted({scored.group.lineage.weights for scored in order.groups}),
                "metrics": values,
            }
        )
        log.info("step", loss=values["loss"], reward=values["reward_mean"])

    def _save(self) -> None:
        with self._phase("checkpoint"), metrics.CHECKPOINT_SECONDS.time():
            if self._conductor is not None:
                self._checkpoints.begin(self._step)
            self._engine.barrier()
            staged = self._checkpoints.staging(self._step)
            self._engine.save(staged / ENGINE_DIRECTORY)
            self._engine.export(staged / POLICY_DIRECTORY)
            self._engine.barrier()
            if self._conductor is not None:
                self._commit(self._conductor)

    def _commit(self, conductor: Conductor) -> None:
        state = TrainerState(
            step=self._step,
            history=conductor.history,
            model=self._model,
            data=conductor.data.version,
            config=config_version(self._config),
            world_size=self._engine.world_size,
            ledger=conductor.ledger.dump(),
            saved_at=time.time(),
        )
        saved = self._checkpoints.commit(self._step, state)
        conductor.intake.commit()
        conductor.status.checkpoint_step = self._step
        metrics.CHECKPOINT_STEP.set(self._step)
        metrics.CHECKPOINT_TIME.set(state.saved_at)
        conductor.controls.answer_saves(checkpoint_message(saved))
        log.info("checkpoint", path=str(saved.path))

    def _evaluate(self) -> None:
        """Rank 0's alone; the other ranks wait at the next order's broadcast."""
        if self._conductor is None or self._records is None or self._evaluated == self._step:
            return
        with self._phase("evaluate"):
            values = self._conductor.evaluate()
        if values is None:
            return
        self._evaluated = self._step
        self._conductor.status.evaluation = values
        for name, value in values.items():
            metrics.EVALUATION_METRIC.labels(name).set(value)
        self._records.add_evaluation({"step": self._step, "time": time.time(), "metrics": values})
        log.info("evaluation", **values)

    def _due(self, every: int) -> bool:
        return every > 0 and self._step % every == 0 and self._step < self._config.trainer.steps

    def _stopped(self) -> bool:
        return self._conductor is not None and self._conductor.controls.stop.is_set()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        metrics.PHASE_SECONDS.labels(name).observe(seconds)
        self._phases[name] = self._phases.get(name, 0.0) + seconds


def checkpoint_message(saved: SavedCheckpoint) -> trainer_pb2.Checkpoint:
    return trainer_pb2.Checkpoint(
        step=saved.state.step, path=str(saved.path), saved_at=saved.state.saved_at, size=size_bytes(saved.path)
    )
