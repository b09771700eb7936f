"""The rows that docs/metrics.md must have, from the metrics themselves."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from services.common import metrics
from services.common.serving import exposition
from services.common.serving.gpu_metrics import GpuCollector, TorchReader
from services.common.transport.redis_metrics import Families
from services.reward import metrics as reward_metrics
from services.rollout.engine import metrics as rollout_metrics
from services.trainer.metrics import counters as trainer_metrics
from services.trainer.metrics import step_gauges


@dataclass(frozen=True)
class MetricRow:
    name: str
    kind: str
    labels: tuple[str, ...]
    help: str

    def markdown(self) -> str:
        return f"| `{self.name}` | {self.kind} | {', '.join(self.labels)} | {self.help} |"


def sections() -> dict[str, list[MetricRow]]:
    step_values = (step_gauges.STEP_METRICS, step_gauges.EVALUATION_METRICS)
    return {
        "Rollout": list(_of_module(rollout_metrics)),
        "Reward": list(_of_module(reward_metrics)),
        "Trainer": list(_of_module(trainer_metrics)),
        "Step metrics": [
            *_of_module(step_gauges),
            *(_of_family(family) for collector in step_values for family in collector.describe()),
        ],
        "Data plane": [*_of_module(metrics), *(_of_family(family) for family in Families().all())],
        "Every service": [
            *_of_module(exposition),
            *(_of_family(family) for family in GpuCollector(TorchReader()).describe()),
        ],
    }


def series_names() -> set[str]:
    """By which Prometheus knows them."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count"), "gauge": ("",), "counter": ("",)}
    return {row.name + suffix for rows in sections().values() for row in rows for suffix in suffixes[row.kind]}


def _of_module(module: ModuleType) -> Iterator[MetricRow]:
    for value in vars(module).values():
        if isinstance(value, MetricWrapperBase):
            (family,) = value.describe()
            yield _of_family(family, value)


def _of_family(family: Metric, labelled: Any = None) -> MetricRow:
    labels = tuple((labelled or family)._labelnames)
    suffix = "_total" if family.type == "counter" else ""
    return MetricRow(family.name + suffix, family.type, labels, family.documentation)
