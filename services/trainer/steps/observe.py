"""What rank 0 reports to Prometheus: one call for each thing that happened."""

import math
import time
from collections.abc import Iterable, Mapping

from prometheus_client import REGISTRY
from trivet.v1 import trainer_pb2

from services.common.config import Config
from services.common.run_files.run_log import FIRST
from services.common.transport.redis_metrics import RedisCollector
from services.trainer.batch.samples import TrainSample
from services.trainer.metrics import counters
from services.trainer.metrics.step_gauges import EVALUATION_METRICS, STEP_METRICS
from services.trainer.metrics.step_metrics import SAMPLER_AGAINST_TRAINER
from services.trainer.steps.status import Controls


def observe_start(config: Config, controls: Controls) -> None:
    """Once, before the first step: what later metrics are compared with, and the run's queues from here on."""
    trainer, reward = config.trainer, config.reward
    counters.STEPS_PLANNED.set(trainer.steps)
    counters.GRAD_NORM_LIMIT.set(trainer.optimizer.max_grad_norm)
    counters.STALENESS_LIMIT.set(trainer.max_staleness)
    counters.CHECKPOINT_INTERVAL.set(trainer.checkpoint_every)
    lowest, highest = (0.0, 1.0) if reward.normalize else (reward.minimum, reward.maximum)
    counters.REWARD_RANGE.labels("lowest").set(lowest)
    counters.REWARD_RANGE.labels("highest").set(highest)
    counters.STEP_TIME.set(time.time())
    counters.PAUSED.set_function(lambda: controls.paused)
    if config.redis.url is not None and config.data.preferences is None:
        REGISTRY.register(RedisCollector(config.redis, config.run.name))


def observe_samples(samples: Iterable[TrainSample]) -> None:
    for sample in samples:
        # One that is not would stay in the histogram's sum for good.
        if math.isfinite(sample.advantage):
            counters.SAMPLE_ADVANTAGE.observe(sample.advantage)


def observe_step(step: int, groups: int, metrics: Mapping[str, float]) -> None:
    """`metrics` are those of steps.jsonl."""
    counters.STEP.set(step)
    counters.STEP_TIME.set(time.time())
    counters.STEP_SECONDS.observe(metrics["step_seconds"])
    counters.GROUPS_TRAINED.inc(groups)
    counters.TOKENS.inc(metrics["tokens"])
    STEP_METRICS.set({**_of_the_only(metrics), **metrics})


def _of_the_only(metrics: Mapping[str, float]) -> dict[str, float]:
    """What the series of the first and of all optimizer steps say where there was one, so that alerts need no cases."""
    found = {f"{FIRST}{name}": metrics[name] for name in SAMPLER_AGAINST_TRAINER if name in metrics}
    return found | ({"grad_norm_max": metrics["grad_norm"]} if "grad_norm" in metrics else {})


def observe_evaluation(metrics: Mapping[str, float]) -> None:
    """`metrics` are those of evaluations.jsonl."""
    EVALUATION_METRICS.set(metrics)


def observe_checkpoint(saved: trainer_pb2.Checkpoint) -> None:
    """Saved, or resumed from: the run is at its step in both cases."""
    counters.STEP.set(saved.step)
    counters.CHECKPOINT_STEP.set(saved.step)
    counters.CHECKPOINT_TIME.set(saved.saved_at)
    counters.CHECKPOINT_BYTES.set(saved.size)
