"""The algorithm and the objective that the configuration asks for."""

from services.common.config import Config
from services.common.config.algorithm import AlgorithmConfig
from services.trainer.objective import (
    Algorithm,
    Calibration,
    ImportanceCorrection,
    KlPenalty,
    Objective,
    PreferenceAlgorithm,
    find_algorithm,
)

REWARD_SETTINGS = ("aggregation", "clip_low", "clip_high", "value_coef", "value_clip", "entropy_coef")
PREFERENCE_SETTINGS = ("beta", "label_smoothing")


def configured_algorithm(config: Config) -> Algorithm | PreferenceAlgorithm:
    """With the settings that take the place of its defaults.

    Raises ValueError for an unknown algorithm, for a setting that it does not have, and for preferences as the data of
    one that learns from rewards.
    """
    settings = config.algorithm
    found = find_algorithm(settings.name)
    if isinstance(found, PreferenceAlgorithm):
        _refuse(settings, REWARD_SETTINGS, f"{found.name} learns from preferences")
        return found.override(settings.beta, settings.label_smoothing, settings.dynamic_sampling)
    _refuse(settings, PREFERENCE_SETTINGS, f"{found.name} learns from rewards")
    if settings.critic == "separate" and found.value is None:
        raise ValueError(f"algorithm.critic is separate, expected shared: {found.name} has no value head")
    if config.data.preferences is not None:
        raise ValueError(f"data.preferences is given, expected data.train: {found.name} learns from rewards")
    return found.override(
        settings.aggregation,
        settings.clip_low,
        settings.clip_high,
        settings.value_coef,
        settings.value_clip,
        settings.entropy_coef,
        settings.dynamic_sampling,
    )


def build_objective(config: Config) -> Objective:
    """Of an algorithm that learns from rewards. Raises ValueError as configured_algorithm does, and for any other."""
    chosen = configured_algorithm(config)
    if isinstance(chosen, PreferenceAlgorithm):
        raise ValueError(f"algorithm is {chosen.name!r}, expected one that learns from rewards")
    stability = config.rl_stability
    correction, calibration = stability.importance_sampling, stability.importance_sampling.calibration
    kl = stability.unbiased_kl
    return Objective(
        chosen,
        ImportanceCorrection(
            mode=correction.mode,
            clip_min=correction.clip_min,
            cap=correction.cap,
            calibration=Calibration(calibration.initial, calibration.decay_steps) if calibration else None,
        ),
        KlPenalty(estimator=kl.estimator, coef=kl.coef, clip_ratio=kl.clip_ratio)
        if stability.needs_reference
        else None,
    )


def needs_reference(config: Config) -> bool:
    return config.rl_stability.needs_reference or isinstance(find_algorithm(config.algorithm.name), PreferenceAlgorithm)


def _refuse(settings: AlgorithmConfig, names: tuple[str, ...], why: str) -> None:
    for name in names:
        value = getattr(settings, name)
        if value is not None:
            raise ValueError(f"algorithm.{name} is {value}, expected none: {why}")
