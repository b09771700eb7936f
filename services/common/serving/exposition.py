"""What /metrics answers: every metric of the process, with the run's name on each series."""

from collections.abc import Iterable

from prometheus_client import REGISTRY, Gauge, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.common.run_files.lineage import code_version
from services.common.serving.gpu_metrics import GpuCollector, open_reader

BUILD = Gauge("trivet_build_info", "1, for the service and the code that it runs", ["service", "code"])


class RunLabel(Collector):
    """`source` with the label `run` on every series, so that runs that share a Prometheus stay apart."""

    def __init__(self, source: Collector, run: str) -> None:
        self._source, self._run = source, run

    def collect(self) -> Iterable[Metric]:
        for family in self._source.collect():
            family.samples = [sample._replace(labels={"run": self._run, **sample.labels}) for sample in family.samples]
            yield family


class Exposition:
    """The text that this process answers; without `configure`, as it stands in the registry."""

    def __init__(self) -> None:
        self._source: Collector = REGISTRY

    def configure(self, service: str, run: str) -> None:
        """To be called once, as a service starts."""
        BUILD.labels(service, code_version()).set(1)
        REGISTRY.register(GpuCollector(open_reader()))
        self._source = RunLabel(REGISTRY, run)

    def text(self) -> bytes:
        return generate_latest(self._source)


EXPOSITION = Exposition()
