"""What turns a batch into optimizer steps, by the kind of the algorithm."""

from collections.abc import Sequence
from typing import Protocol

from services.common.config import Config
from services.trainer.batch.samples import TrainSample
from services.trainer.engine.protocol import UpdateEngine
from services.trainer.metrics.step_metrics import StepMetrics
from services.trainer.objective import PreferenceAlgorithm
from services.trainer.update.algorithm import configured_algorithm
from services.trainer.update.policy_update import Updater
from services.trainer.update.preference_update import PreferenceUpdater
from services.trainer.update.reference import Reference


class TrainsBatches(Protocol):
    def train(self, samples: Sequence[TrainSample]) -> StepMetrics:
        """All of a step's samples, the same on every rank; metrics of the whole step."""
        ...


def open_updater(config: Config, engine: UpdateEngine, reference: Reference | None) -> Updater | PreferenceUpdater:
    """Raises ValueError for an unknown algorithm, or one that learns from preferences without a reference."""
    if not isinstance(configured_algorithm(config), PreferenceAlgorithm):
        return Updater(config, engine, reference)
    if reference is None:
        raise ValueError(f"reference is missing, expected one: {config.algorithm.name} holds on to it")
    return PreferenceUpdater(config, engine, reference)
