"""Loss and gradient of each algorithm over a recorded step's batch, at the policy as it was before the step."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from services.common.config import Config, overrides_by_algorithm
from services.common.logs import get_logger
from services.common.run_files.algorithm_switch import algorithm_overrides
from services.common.run_files.compare_report import ComparedStep, CompareReport
from services.common.run_files.recorded_steps import RecordedStep
from services.common.secrets import hidden_override
from services.trainer.batch.groups import batch_samples
from services.trainer.engine.plain_engine import PlainEngine, plain_device
from services.trainer.model.policy import configured_policy
from services.trainer.update.algorithm import configured_algorithm
from services.trainer.update.open import open_updater
from services.trainer.update.reference import Reference, open_reference

# The whole batch is one optimizer step, so that there is one gradient.
ONE_STEP = ("trainer.minibatches=1", "trainer.epochs=1")

log = get_logger(__name__)


def compare(
    steps: Sequence[RecordedStep], algorithms: Sequence[str], overrides: Sequence[str], overrides_for: Sequence[str]
) -> CompareReport:
    """`overrides` hold for every algorithm, `overrides_for` (algorithm:section.key=value) for one.

    Raises ConfigError for settings, InvalidData for recordings, ValueError for algorithms that cannot be used.
    """
    own = overrides_by_algorithm(overrides_for, algorithms)
    base = steps[0].config(list(overrides))
    settings = [(*overrides, *algorithm_overrides(base, name), *ONE_STEP, *own[name]) for name in algorithms]
    return CompareReport(
        run=steps[0].record.run,
        algorithms=tuple(algorithms),
        overrides=tuple(tuple(map(hidden_override, each)) for each in settings),
        steps=tuple(_compare(step, [step.config(list(each)) for each in settings]) for step in steps),
    )


def _compare(step: RecordedStep, configs: Sequence[Config]) -> ComparedStep:
    order = step.order()
    engines, references = Engines(step), References()
    metrics: list[dict[str, float]] = []
    gradients: list[Tensor | None] = []
    for config in configs:
        engine = engines.of(config)
        samples = batch_samples(order, config, engine.facts)
        found = open_updater(config, engine, references.of(config, engine)).train(samples)
        metrics.append({name: value for name, value in found.items() if name not in {"learning_rate", "step_applied"}})
        gradients.append(engine.take_gradient())
        log.info("compared", step=step.record.step, algorithm=config.algorithm.name, loss=found["loss"])
    return ComparedStep(
        step=step.record.step,
        samples=sum(len(scored.scores) for scored in order.groups),
        metrics=tuple(metrics),
        cosines=tuple(tuple(cosine(left, right) for right in gradients) for left in gradients),
    )


class Engines:
    """The policy before the step, loaded once per kind of critic: none, a value head, a separate model."""

    def __init__(self, step: RecordedStep) -> None:
        self._step = step
        self._loaded: dict[str, PlainEngine] = {}

    def of(self, config: Config) -> PlainEngine:
        kind = config.algorithm.critic if configured_algorithm(config).value is not None else "none"
        if kind not in self._loaded:
            device = plain_device(config)
            policy = configured_policy(config, str(self._step.policy), device)
            self._loaded[kind] = PlainEngine(policy, device, self._step.record.steps_applied)
        return self._loaded[kind]


class References:
    """Each is loaded once, however many algorithms use it."""

    def __init__(self) -> None:
        self._loaded: dict[str, Reference | None] = {}

    def of(self, config: Config, engine: PlainEngine) -> Reference | None:
        key = f"{config.model.model_dump_json()} {config.reference.model_dump_json()}"
        if self._loaded.get(key) is None:
            self._loaded[key] = open_reference(config, engine)
        return self._loaded[key]


def cosine(left: Float[Tensor, "parameters"] | None, right: Float[Tensor, "parameters"] | None) -> float | None:
    """In float64; None where a gradient is missing, zero or not finite."""
    if left is None or right is None:
        return None
    a, b = left.double(), right.double()
    norms = float(a.norm() * b.norm())
    if not 0 < norms < float("inf"):
        return None
    return float(a @ b) / norms
