"""Trains recorded orders again and compares the results with the recording."""

from collections.abc import Iterator, Mapping, Sequence

from services.common.config import Config
from services.common.errors import InvalidData
from services.common.logs import get_logger
from services.common.run_files.recorded_steps import RecordedStep, StepRecord
from services.common.run_files.rerun_report import MetricPair, RerunReport, RerunStep
from services.common.secrets import hidden_override
from services.trainer.batch.groups import batch_samples
from services.trainer.engine.protocol import RerunEngine
from services.trainer.metrics.step_metrics import StepMetrics
from services.trainer.recording.environment import environment
from services.trainer.update.updater import Updater

log = get_logger(__name__)


class Rerunner:
    """Every rank has one. `config` is the recorded one with `overrides`; the engine holds the recorded policy."""

    def __init__(self, config: Config, overrides: Sequence[str], engine: RerunEngine, updater: Updater) -> None:
        self._config, self._overrides, self._engine, self._updater = config, tuple(overrides), engine, updater

    def rerun(self, steps: Sequence[RecordedStep]) -> RerunReport:
        """Consecutive steps. Raises InvalidData if the state of the first one cannot be loaded."""
        first = steps[0]
        fresh = starts_fresh(first.record, self._overrides)
        if not fresh:
            self._load(first)
        record = first.record
        return RerunReport(
            run=record.run,
            overrides=tuple(map(hidden_override, self._overrides)),
            start="policy" if fresh else "engine",
            recorded_world_size=record.world_size,
            recorded_zero_stage=record.zero_stage,
            world_size=self._engine.world_size,
            zero_stage=self._config.trainer.zero_stage,
            warnings=tuple(changes(record.environment, environment(self._config, self._engine.device))),
            steps=tuple(self._step(step) for step in steps),
        )

    def _load(self, step: RecordedStep) -> None:
        try:
            self._engine.load(step.engine)
        except InvalidData as error:
            raise InvalidData(
                error.code,
                f"{error}: step {step.record.step} has optimizer state ({step.record.steps_applied} steps applied), "
                "which has to be loaded; only a step with none applied starts from its policy alone",
            ) from error

    def _step(self, step: RecordedStep) -> RerunStep:
        record = step.record
        comparable = (record.world_size, record.zero_stage) == (
            self._engine.world_size,
            self._config.trainer.zero_stage,
        )
        before = self._engine.state_digest()
        metrics = self._updater.train(batch_samples(step.order(), self._config, self._engine.facts))
        after = self._engine.state_digest()
        log.info("rerun", step=record.step, loss=metrics["loss"])
        return RerunStep(
            step=record.step,
            starts_alike=before == record.digest_before if comparable else None,
            ends_alike=after == record.digest_after if comparable else None,
            metrics=tuple(compare_metrics(record.metrics, metrics)),
        )


def starts_fresh(record: StepRecord, overrides: Sequence[str]) -> bool:
    """Before the first optimizer step the policy is the whole state, and fits any number of ranks and ZeRO stage."""
    return bool(overrides) and record.steps_applied == 0


def compare_metrics(recorded: Mapping[str, str], rerun: StepMetrics) -> Iterator[MetricPair]:
    """`recorded` holds float.hex()."""
    for name in sorted({*recorded, *rerun}):
        before = float.fromhex(recorded[name]) if name in recorded else None
        after = float(rerun[name]) if name in rerun else None
        equal = before is not None and after is not None and before.hex() == after.hex()
        yield MetricPair(name=name, recorded=before, rerun=after, equal=equal)


def changes(recorded: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*recorded, *now}):
        before, after = recorded.get(name, "none"), now.get(name, "none")
        if before != after:
            yield f"{name} is {after}, recorded with {before}"
