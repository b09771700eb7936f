from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from services.common.serving.gpu_metrics import GpuCollector, GpuReading, NvmlReader, TorchReader


class NvmlError(Exception):
    pass


class FakeNvml:
    """Two GPUs as NVML tells of them; a handle is a number."""

    NVMLError = NvmlError

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{'ab'[handle]}1234"

    def nvmlDeviceGetMemoryInfo(self, handle):
        if handle == self.broken:
            raise NvmlError("lost")
        return SimpleNamespace(used=10 + handle, total=100)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=50 * handle)


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [(None, ["0", "1"]), ("1", ["1"]), ("1,0", ["0", "1"]), ("GPU-b", ["1"]), ("", []), ("-1", [])],
)
def test_only_visible_gpus_are_read(visible, gpus):
    assert [reading.gpu for reading in NvmlReader(FakeNvml(), visible).read()] == gpus


def test_a_gpu_that_does_not_answer_does_not_hide_the_other():
    assert NvmlReader(FakeNvml(broken=0), None).read() == [GpuReading("1", 11, 100, 0.5)]


def test_readings_become_series():
    registry = CollectorRegistry()
    registry.register(GpuCollector(NvmlReader(FakeNvml(), None)))
    assert registry.get_sample_value("trivet_gpu_memory_used_bytes", {"gpu": "1"}) == 11
    assert registry.get_sample_value("trivet_gpu_memory_total_bytes", {"gpu": "0"}) == 100
    assert registry.get_sample_value("trivet_gpu_utilization_ratio", {"gpu": "1"}) == 0.5


def test_torch_tells_the_memory_of_the_gpu_in_use(monkeypatch):
    cuda = SimpleNamespace(is_initialized=lambda: True, mem_get_info=lambda: (30, 100), current_device=lambda: 3)
    monkeypatch.setitem(__import__("sys").modules, "torch", SimpleNamespace(cuda=cuda))
    assert TorchReader().read() == [GpuReading("3", 70, 100, None)]
    cuda.is_initialized = lambda: False
    assert TorchReader().read() == []
