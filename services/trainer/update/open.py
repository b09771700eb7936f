"""The updater of the configured algorithm."""

from services.common.config import Config
from services.trainer.engine.protocol import UpdateEngine
from services.trainer.objective import PreferenceAlgorithm
from services.trainer.update.algorithm import configured_algorithm
from services.trainer.update.policy_update import PolicyUpdater
from services.trainer.update.preference_update import PreferenceUpdater
from services.trainer.update.reference import Reference
from services.trainer.update.updater import Updater


def open_updater(config: Config, engine: UpdateEngine, reference: Reference | None) -> Updater:
    """Raises ValueError for an unknown algorithm, or one that learns from preferences without a reference."""
    if not isinstance(configured_algorithm(config), PreferenceAlgorithm):
        return PolicyUpdater(config, engine, reference)
    if reference is None:
        raise ValueError(f"reference is missing, expected one: {config.algorithm.name} holds on to it")
    return PreferenceUpdater(config, engine, reference)
