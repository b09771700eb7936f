import inspect
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from trivet.v1 import rollout_pb2

from services.common.config import Config, ConfigError, WeightsConfig
from services.rollout.engine.delivery import Delivery
from services.rollout.vllm_engine.cuda_ipc import rebuild_arguments
from services.rollout.vllm_engine.weight_update import update_info
from services.trainer.weights.channels import cuda_buffer
from services.trainer.weights.setup import open_source, open_transfer, why_unsuitable


def configuration(transfer):
    return Config.model_construct(weights=WeightsConfig(transfer=transfer))


def engine(device, ranks=1):
    return SimpleNamespace(device=torch.device(device), world_size=ranks, weight_source=lambda: "the source")


def test_by_disk_nothing_is_opened():
    assert open_source(configuration("disk"), engine("cpu")) is None
    assert open_transfer(configuration("disk"), None, None, torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("transfer", "trainer", "sentence"),
    [
        ("nccl", engine("cpu"), "weights.transfer is nccl, expected disk: the trainer runs on the cpu"),
        ("ipc", engine("cpu"), "weights.transfer is ipc, expected disk: the trainer runs on the cpu"),
        ("ipc", engine("cuda", ranks=2), "weights.transfer is ipc, expected nccl or disk with 2 trainer ranks"),
    ],
)
def test_a_trainer_that_cannot_take_part_is_refused(transfer, trainer, sentence):
    with pytest.raises(ConfigError, match=sentence):
        open_source(configuration(transfer), trainer)


@pytest.mark.parametrize(("transfer", "ranks"), [("nccl", 1), ("nccl", 8), ("ipc", 1)])
def test_a_trainer_on_gpus_takes_part(transfer, ranks):
    assert open_source(configuration(transfer), engine("cuda", ranks)) == "the source"


@pytest.mark.parametrize(
    ("devices", "nccl", "ipc"),
    [
        (["GPU-a"], "shares GPU GPU-a with the trainer", None),
        (["GPU-b"], None, "it runs on GPU GPU-b, the trainer on GPU-a"),
        (["GPU-a", "GPU-b"], "shares GPU GPU-a with the trainer", "it runs on GPU GPU-a, GPU-b"),
        (["GPU-b", "GPU-c"], None, "it runs on GPU GPU-b, GPU-c"),
        ([""], "it runs on a CPU", "it runs on a CPU"),
        ([], "it runs on a CPU", "it runs on a CPU"),
    ],
)
def test_whose_memory_cannot_be_reached_is_reported(devices, nccl, ipc):
    entry = rollout_pb2.RegisteredRollout(rollout_id="r", devices=devices)
    for transfer, expected in (("nccl", nccl), ("ipc", ipc)):
        reason = why_unsuitable(entry, transfer, "GPU-a")
        assert reason is None if expected is None else expected in reason


def test_a_buffer_crosses_to_the_worker_whole():
    """What torch exports here is what torch is given there, over the wire and through plain fields."""
    exported = {
        "tensor_cls": torch.Tensor,
        "tensor_size": torch.Size([4096]),
        "tensor_stride": (1,),
        "tensor_offset": 0,
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.uint8,
        "storage_device": 2,
        "storage_handle": bytes(range(64)),
        "storage_size_bytes": 4096,
        "storage_offset_bytes": 2**40,
        "requires_grad": False,
        "ref_counter_handle": b"/torch_17_1",
        "ref_counter_offset": 3,
        "event_handle": bytes(range(64, 128)),
        "event_sync_required": True,
    }
    assert list(exported) == list(inspect.signature(rebuild_cuda_tensor).parameters)
    buffer = cuda_buffer(tuple(exported.values()), "GPU-a")
    part = rollout_pb2.TransferPart.FromString(
        rollout_pb2.TransferPart(first=0, count=0, buffer=buffer).SerializeToString()
    )
    delivery = Delivery(rollout_pb2.TransferBegin())
    part.count = 1
    delivery.begin.tensors.add(name="a", dtype="uint8", shape=[4096])
    delivery.received = 1
    info = update_info(delivery, part)
    assert info["buffer"]["device"] == "GPU-a"
    assert rebuild_arguments(info["buffer"]) == tuple(exported.values())
