"""What rank 0 tells Prometheus of its run: one call for each thing that happened."""

import time
from collections.abc import Iterable, Mapping

from prometheus_client import REGISTRY
from trivet.v1 import trainer_pb2

from services.common.config import Config
from services.common.records import FIRST
from services.common.redis_metrics import RedisCollector
from services.trainer import metrics
from services.trainer.samples import TrainSample
from services.trainer.status import Controls
from services.trainer.step_metrics import EVALUATION_VALUES, STEP_VALUES
from services.trainer.values import SAMPLER_AGAINST_TRAINER


def observe_start(config: Config, controls: Controls) -> None:
    """Once, before the first step: what later values are compared with, and the run's queues from here on."""
    trainer, reward = config.trainer, config.reward
    metrics.STEPS_PLANNED.set(trainer.steps)
    metrics.GRAD_NORM_LIMIT.set(trainer.optimizer.max_grad_norm)
    metrics.STALENESS_LIMIT.set(trainer.max_staleness)
    metrics.CHECKPOINT_INTERVAL.set(trainer.checkpoint_every)
    lowest, highest = (0.0, 1.0) if reward.normalize else (reward.minimum, reward.maximum)
    metrics.REWARD_RANGE.labels("lowest").set(lowest)
    metrics.REWARD_RANGE.labels("highest").set(highest)
    metrics.STEP_TIME.set(time.time())
    metrics.PAUSED.set_function(lambda: controls.paused)
    if config.redis.url is not None and config.data.preferences is None:
        REGISTRY.register(RedisCollector(config.redis, config.run.name))


def observe_samples(samples: Iterable[TrainSample]) -> None:
    for sample in samples:
        metrics.SAMPLE_ADVANTAGE.observe(sample.advantage)


def observe_step(step: int, groups: int, values: Mapping[str, float]) -> None:
    """`values` are those of steps.jsonl."""
    metrics.STEP.set(step)
    metrics.STEP_TIME.set(time.time())
    metrics.STEP_SECONDS.observe(values["step_seconds"])
    metrics.GROUPS_TRAINED.inc(groups)
    metrics.TOKENS.inc(values["tokens"])
    STEP_VALUES.set({**_of_the_only(values), **values})


def _of_the_only(values: Mapping[str, float]) -> dict[str, float]:
    """What the series of the first and of all optimizer steps say where there was one, so that alerts need no cases."""
    found = {f"{FIRST}{name}": values[name] for name in SAMPLER_AGAINST_TRAINER if name in values}
    return found | ({"grad_norm_max": values["grad_norm"]} if "grad_norm" in values else {})


def observe_evaluation(values: Mapping[str, float]) -> None:
    """`values` are those of evaluations.jsonl."""
    EVALUATION_VALUES.set(values)


def observe_checkpoint(saved: trainer_pb2.Checkpoint) -> None:
    """Saved, or gone on from: the run is at its step in both cases."""
    metrics.STEP.set(saved.step)
    metrics.CHECKPOINT_STEP.set(saved.step)
    metrics.CHECKPOINT_TIME.set(saved.saved_at)
    metrics.CHECKPOINT_BYTES.set(saved.size)
