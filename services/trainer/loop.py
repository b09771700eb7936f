"""The training loop. Every rank runs it; only rank 0 talks to Redis and decides what comes next."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass

import structlog
from trivet.v1 import step_pb2, trainer_pb2

from services.common.config import Config
from services.common.errors import GaveUp, InvalidData
from services.common.logs import get_logger
from services.common.run_files.atomic import removed_on_failure
from services.common.run_files.held_out import Score
from services.common.run_files.lineage import config_version, evaluation_version
from services.common.run_files.run_log import RunLog
from services.common.serving.arguments import starting
from services.trainer.batch.groups import batch_samples
from services.trainer.batch.samples import TrainSample
from services.trainer.checkpoint.checksums import sum_files
from services.trainer.checkpoint.directory import (
    ENGINE_DIRECTORY,
    POLICY_DIRECTORY,
    Checkpoints,
    SavedCheckpoint,
    TrainerState,
    check_resumable,
    size_bytes,
)
from services.trainer.checkpoint.resume import take_up
from services.trainer.engine.protocol import TrainEngine
from services.trainer.export.tensors import WeightSource
from services.trainer.metrics import counters
from services.trainer.metrics.summary import summarize
from services.trainer.recording.recorder import Recorder
from services.trainer.steps import observe
from services.trainer.steps.collapse import CollapseGuard, where_to_go_on
from services.trainer.steps.deaths import Deaths
from services.trainer.steps.lease import Lease
from services.trainer.steps.source import Order, StepSource
from services.trainer.update.learning_signal import LearningSignal
from services.trainer.update.preference_update import PreferenceUpdater
from services.trainer.update.soundness import Soundness
from services.trainer.update.updater import Updater
from services.trainer.weights.publish import Publication, Release

log = get_logger(__name__)


@dataclass(frozen=True)
class Machinery:
    """What every rank has. `model` is the digest of the architecture, `settings` are those that must not change."""

    engine: TrainEngine
    updater: Updater
    checkpoints: Checkpoints
    recorder: Recorder
    model: str
    settings: dict[str, str]
    # None where every version goes to disk.
    source: WeightSource | None = None


@dataclass(frozen=True)
class RankZero:
    """What rank 0 has in addition. Without a release the policy goes nowhere but into checkpoints."""

    source: StepSource
    run_log: RunLog
    release: Release | None
    # None where no other trainer could have the run.
    lease: Lease | None = None
    deaths: Deaths | None = None


class TrainingLoop:
    def __init__(self, config: Config, machinery: Machinery, rank_zero: RankZero | None) -> None:
        """`rank_zero` is None on every rank but 0."""
        self._config, self._rank_zero = config, rank_zero
        self._engine, self._updater, self._checkpoints = machinery.engine, machinery.updater, machinery.checkpoints
        self._recorder, self._model, self._settings = machinery.recorder, machinery.model, machinery.settings
        self._publication = Publication(machinery.engine, machinery.source, rank_zero.release if rank_zero else None)
        self._signal = LearningSignal(config)
        self._soundness = Soundness(machinery.engine, config.trainer.max_skipped_steps)
        self._step = 0
        # Of rank 0.
        self._newest: str | None = None
        self._phases: dict[str, float] = {}
        self._evaluated: int | None = None
        self._guard: CollapseGuard | None = None
        self._reward_fell = False

    def run(self) -> bool:
        """True when the last step is done, False when it was asked to stop before.

        Raises ConfigError for a checkpoint or a policy that the run cannot resume from, GaveUp when no further step can
        help, and TrivetError.
        """
        with starting():
            self._start()
        self._publish()
        self._evaluate()
        self._phases = {}
        if self._rank_zero is not None:
            self._rank_zero.source.status.start_clock(self._step)
        while self._step < self._config.trainer.steps:
            order = self._next_order()
            action = order.message.action
            if action == step_pb2.STEP_ACTION_TRAIN:
                fit = self._train(order)
                if fit:
                    self._publish()
                self._report(order.message)
                self._soundness.refuse(self._step, fit, self._newest)
                if self._due(self._config.trainer.checkpoint_every):
                    self._save()
                if self._due(self._config.evaluation.every) or self._reward_fell:
                    self._evaluate()
            elif action == step_pb2.STEP_ACTION_SAVE:
                self._save()
            elif action == step_pb2.STEP_ACTION_PUBLISH:
                self._publish(durable=True)
            elif action == step_pb2.STEP_ACTION_STOP:
                self._save()
                return False
        self._save()
        self._evaluate()
        return not self._stopped()

    def _start(self) -> None:
        """Resumes from the newest intact checkpoint, if there is one."""
        saved = take_up(self._checkpoints, self._engine, self._check_resumable)
        if saved is not None:
            self._step = saved.state.step
            structlog.contextvars.bind_contextvars(step=self._step)
            self._newest = str(saved.path)
            log.info("resumed", checkpoint=self._newest)
        if not self._engine.finite():
            raise InvalidData(
                "weights_not_finite",
                f"{self._newest or self._config.model.path} holds weights that are not finite or larger than float16 "
                "holds (65504)",
            )
        if self._rank_zero is None:
            return
        source, run_log = self._rank_zero.source, self._rank_zero.run_log
        self._guard = CollapseGuard(
            self._config,
            [entry for entry in run_log.evaluations() if entry["step"] <= self._step],
            [entry for entry in run_log.steps() if entry["step"] <= self._step],
        )
        source.status.step = source.status.checkpoint_step = self._step
        if saved is not None:
            source.restore(saved.state)
            observe.observe_checkpoint(checkpoint_message(saved))

    def _check_resumable(self, saved: SavedCheckpoint) -> None:
        data = self._rank_zero.source.data_version if self._rank_zero else saved.state.data
        check_resumable(
            saved, model=self._model, data=data, world_size=self._engine.world_size, settings=self._settings
        )

    def _check_lease(self) -> None:
        """Before anything is taken or written. Raises TrivetError when another trainer has the run."""
        if self._rank_zero is not None and self._rank_zero.lease is not None:
            self._rank_zero.lease.check()

    def _next_order(self) -> Order:
        self._check_lease()
        with self._phase("wait"):
            return self._share(self._rank_zero.source.next_order() if self._rank_zero else None)

    def _share(self, order: Order | None) -> Order:
        """Rank 0's order on every rank; the others pass None."""
        if order is not None and self._engine.world_size == 1:
            return order
        shared = self._engine.broadcast_bytes(None if order is None else order.message.SerializeToString())
        return Order(step_pb2.StepOrder.FromString(shared)) if order is None else order

    def _samples(self, order: Order) -> list[TrainSample]:
        return batch_samples(order.message, self._config, self._engine.facts, order.samples)

    def _train(self, order: Order) -> bool:
        """True where the weights after it are fit to be published."""
        structlog.contextvars.bind_contextvars(step=self._step + 1)
        with self._recorded(order.message), self._phase("train"), self._under_way(order.message):
            samples = self._samples(order)
            observe.observe_samples(samples)
            self._metrics = self._updater.train(samples)
        self._step += 1
        if self._rank_zero is not None:
            self._rank_zero.source.step = self._step
        return self._soundness.check(self._metrics, self._updater.skipped)

    @contextmanager
    def _recorded(self, order: step_pb2.StepOrder) -> Iterator[None]:
        due = self._recorder.due(self._step + 1)
        if due:
            with self._phase("recording"):
                self._recorder.begin(self._step + 1, order)
        yield
        if due:
            with self._phase("recording"):
                self._recorder.finish(self._metrics)

    def _under_way(self, order: step_pb2.StepOrder) -> AbstractContextManager[None]:
        if self._rank_zero is None or self._rank_zero.deaths is None:
            return nullcontext()
        return self._rank_zero.deaths.step([scored.group.prompt.request for scored in order.groups])

    def _publish(self, *, durable: bool = False) -> None:
        self._check_lease()
        if self._config.data.preferences is None:
            with self._phase("publish"), counters.PUBLISH_SECONDS.time():
                last = self._step == self._config.trainer.steps
                durable = durable or last or self._due(self._config.trainer.checkpoint_every)
                self._publication.publish(self._step, durable=durable)
        if self._rank_zero is not None:
            # Before anything else, so that the rollouts have work while the rest is written down.
            self._rank_zero.source.issue()

    def _report(self, order: step_pb2.StepOrder) -> None:
        if self._rank_zero is None:
            return
        sampled = self._config.data.preferences is None
        metrics = {**self._metrics, **summarize(order, self._step - 1, self._phases, sampled=sampled)}
        if sampled:
            metrics |= self._signal.observe(order.groups)
        self._phases = {}
        status = self._rank_zero.source.status
        status.metrics, status.step = metrics, self._step
        observe.observe_step(self._step, len(order.groups), metrics)
        self._rank_zero.run_log.add_step(
            {
                "step": self._step,
                "time": time.time(),
                "groups": [scored.group.prompt.group_id for scored in order.groups],
                "samples": [sample.sample_id for scored in order.groups for sample in scored.group.samples],
                "weights": sorted({scored.group.lineage.weights for scored in order.groups}),
                "metrics": metrics,
                **({"skipped": [asdict(each) for each in self._updater.skipped]} if self._updater.skipped else {}),
            }
        )
        if self._guard is not None and "reward_mean" in metrics:
            self._reward_fell = self._guard.rewarded(metrics["reward_mean"])
        log.info("step", loss=metrics["loss"], reward=metrics.get("reward_mean"))

    def _save(self) -> None:
        with self._phase("checkpoint"), counters.CHECKPOINT_SECONDS.time():
            if self._rank_zero is not None:
                self._checkpoints.begin(self._step)
            self._engine.barrier()
            staged = self._checkpoints.staging(self._step)
            with removed_on_failure(staged, mine=self._rank_zero is not None):
                self._engine.save(staged / ENGINE_DIRECTORY)
                self._engine.export(staged / POLICY_DIRECTORY)
                self._engine.barrier()
                sums = sum_files(staged, self._engine)
            if self._rank_zero is not None:
                self._commit(self._rank_zero.source, sums)

    def _commit(self, source: StepSource, sums: dict[str, str]) -> None:
        self._check_lease()
        state = TrainerState(
            step=self._step,
            history=source.history,
            model=self._model,
            data=source.data_version,
            config=config_version(self._config),
            world_size=self._engine.world_size,
            ledger=source.dump(),
            saved_at=time.time(),
            settings=self._settings,
        )
        saved = self._checkpoints.commit(self._step, state, sums)
        self._newest = str(saved.path)
        source.commit()
        if self._guard is not None and self._guard.best is not None and self._guard.best.step == self._step:
            self._keep_best(self._guard.best)
        source.status.checkpoint_step = self._step
        message = checkpoint_message(saved)
        observe.observe_checkpoint(message)
        source.controls.answer_saves(message)
        log.info("checkpoint", path=str(saved.path))

    def _evaluate(self) -> None:
        if self._evaluated == self._step:
            return
        with self._phase("evaluate"):
            metrics = self._held_out()
        if metrics is None:
            return
        self._evaluated = self._step
        if self._rank_zero is None:
            return
        self._rank_zero.source.status.evaluation = metrics
        observe.observe_evaluation(metrics)
        asks = evaluation_version(self._config)
        self._rank_zero.run_log.add_evaluation(
            {"step": self._step, "time": time.time(), "asks": asks, "metrics": metrics}
        )
        log.info("evaluation", **metrics)
        if self._guard is not None:
            self._check_collapse(self._guard, self._rank_zero)

    def _check_collapse(self, guard: CollapseGuard, rank_zero: RankZero) -> None:
        """Raises GaveUp when the run has collapsed."""
        reason = guard.evaluated(rank_zero.run_log.evaluations())
        if reason is not None:
            raise GaveUp("collapsed", f"{reason}; {where_to_go_on(self._checkpoints.best())}")
        best = guard.best
        # The model that the run began with needs no checkpoint.
        if best is not None and best.step == self._step > 0 and not self._keep_best(best) and guard.improved:
            rank_zero.source.controls.request_save()

    def _keep_best(self, best: Score) -> bool:
        kept = self._checkpoints.keep_best(best)
        if kept:
            counters.BEST_CHECKPOINT_STEP.set(best.step)
        return kept

    def _held_out(self) -> dict[str, float] | None:
        """Pairs are for every rank to evaluate; prompts are rank 0's, and the others wait at the next broadcast."""
        if self._config.data.preferences is not None and isinstance(self._updater, PreferenceUpdater):
            order = self._share(self._rank_zero.source.held_out() if self._rank_zero else None)
            return self._updater.evaluate(self._samples(order))
        return self._rank_zero.source.evaluate() if self._rank_zero else None

    def _due(self, every: int) -> bool:
        return every > 0 and self._step % every == 0 and self._step < self._config.trainer.steps

    def _stopped(self) -> bool:
        return self._rank_zero is not None and self._rank_zero.source.controls.stop.is_set()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        counters.PHASE_SECONDS.labels(name).observe(seconds)
        self._phases[name] = self._phases.get(name, 0.0) + seconds


def checkpoint_message(saved: SavedCheckpoint) -> trainer_pb2.Checkpoint:
    return trainer_pb2.Checkpoint(
        step=saved.state.step, path=str(saved.path), saved_at=saved.state.saved_at, size=size_bytes(saved.path)
    )
