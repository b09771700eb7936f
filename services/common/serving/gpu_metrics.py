"""Memory and use of the GPUs of a service, read at every scrape: from NVML, or without it from torch."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.common.logs import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class GpuReading:
    gpu: str
    used_bytes: int
    total_bytes: int
    # Share of the last sample period in which a kernel ran; None where it is not known.
    utilization: float | None


class GpuReader(Protocol):
    def read(self) -> list[GpuReading]: ...


class NvmlReader:
    """All GPUs that CUDA_VISIBLE_DEVICES (`visible`) lets through. Opens no context, and so costs no GPU memory.

    `nvml` is the module pynvml (package nvidia-ml-py), initialized.
    """

    def __init__(self, nvml: Any, visible: str | None) -> None:
        self._nvml = nvml
        chosen = None if visible is None else [part.strip() for part in visible.split(",")]
        everything = {str(index): nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())}
        self._handles = {
            gpu: handle
            for gpu, handle in everything.items()
            if chosen is None or gpu in chosen or _named(nvml.nvmlDeviceGetUUID(handle), chosen)
        }

    def read(self) -> list[GpuReading]:
        readings = []
        for gpu, handle in self._handles.items():
            try:
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
                rates = self._nvml.nvmlDeviceGetUtilizationRates(handle)
            except self._nvml.NVMLError as error:
                log.warning("GPU not read", gpu=gpu, reason=str(error))
                continue
            readings.append(GpuReading(gpu, memory.used, memory.total, rates.gpu / 100))
        return readings


class TorchReader:
    """The GPU that this process computes on, from when it first does."""

    def read(self) -> list[GpuReading]:
        torch = sys.modules.get("torch")
        # Asking earlier would open a context.
        if torch is None or not torch.cuda.is_initialized():
            return []
        free, total = torch.cuda.mem_get_info()
        return [GpuReading(str(torch.cuda.current_device()), total - free, total, None)]


def open_reader() -> GpuReader:
    if importlib.util.find_spec("pynvml") is None:
        return TorchReader()
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        return NvmlReader(nvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except nvml.NVMLError as error:
        log.info("NVML does not answer", reason=str(error))
        return TorchReader()


class GpuCollector(Collector):
    """Without a GPU there are no series."""

    def __init__(self, reader: GpuReader) -> None:
        self._reader = reader

    def describe(self) -> Iterable[Metric]:
        return _families()

    def collect(self) -> Iterable[Metric]:
        used, total, utilization = families = _families()
        for reading in self._reader.read():
            used.add_metric([reading.gpu], reading.used_bytes)
            total.add_metric([reading.gpu], reading.total_bytes)
            if reading.utilization is not None:
                utilization.add_metric([reading.gpu], reading.utilization)
        return families


def _families() -> tuple[GaugeMetricFamily, GaugeMetricFamily, GaugeMetricFamily]:
    return (
        GaugeMetricFamily("trivet_gpu_memory_used_bytes", "Memory in use on a GPU, by all processes", labels=["gpu"]),
        GaugeMetricFamily("trivet_gpu_memory_total_bytes", "Memory of a GPU", labels=["gpu"]),
        GaugeMetricFamily("trivet_gpu_utilization_ratio", "Share of time in which a GPU computed", labels=["gpu"]),
    )


def _named(uuid: str, chosen: list[str]) -> bool:
    """CUDA_VISIBLE_DEVICES takes the beginning of a UUID ("GPU-…") as well."""
    return any(part and uuid.startswith(part) for part in chosen)
