"""The update at vLLM's seam: a fake AsyncLLM that keeps a prefix cache as vLLM's scheduler does."""

import ast
import asyncio
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
from trivet.v1 import rollout_pb2, weights_pb2

from services.common.errors import InvalidData, Unavailable
from services.rollout.engine.delivery import Delivery
from services.rollout.engine.protocol import EngineFailed, LoadFailed
from services.rollout.vllm_engine.weight_update import (
    StaleCache,
    announced_layout,
    check_reload,
    init_info,
    join,
    load,
    receive,
    relabel,
    update_info,
)


class FakeLlm:
    def __init__(self, *, caching=False, resets=True):
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=caching))
        self.weights, self.label = "old", "0:"
        self.cached = {"a prompt": "old"} if caching else {}
        self.running = ["a paused request"]
        self.calls = []
        self.reloads = 0
        self.drifts = False
        self._resets = resets

    async def collective_rpc(self, method, args=(), kwargs=None):
        self.calls.append((method, *args, *(kwargs or {}).values()))
        if method == "trivet_reload":
            (self.weights,) = args
            self.reloads += 1

    async def compute_weight_checksums(self):
        return [{"model.norm.weight": "a", "lm_head.weight": f"b{self.reloads if self.drifts else 0}"}]

    async def reset_prefix_cache(self, *, reset_running_requests=False):
        # As vLLM does: blocks in use stay, unless their requests are preempted.
        if not self._resets or (self.running and not reset_running_requests):
            return False
        self.running, self.cached = [], {}
        return True

    async def update_weight_version(self, label):
        # Tokens of this version must not see what others computed.
        assert all(weights == self.weights for weights in self.cached.values())
        self.label = label


@pytest.mark.parametrize("caching", [True, False])
async def test_nothing_of_the_old_weights_is_left(caching):
    llm = FakeLlm(caching=caching)
    await load(llm, "weights/3")
    await relabel(llm, "3:00ff")
    assert (llm.weights, llm.label, llm.cached) == ("weights/3", "3:00ff", {})
    # Without a cache nobody is preempted for it.
    assert bool(llm.running) != caching


async def test_a_cache_that_stays_is_an_error_and_no_version():
    llm = FakeLlm(caching=True, resets=False)
    await load(llm, "weights/3")
    with pytest.raises(StaleCache, match="prefix cache"):
        await relabel(llm, "3:00ff")
    assert llm.label == "0:"


async def test_a_reload_that_changes_the_same_weights_is_an_error():
    llm = FakeLlm()
    await check_reload(llm, "weights/0")
    llm.drifts = True
    with pytest.raises(EngineFailed, match=r"changes 1 tensors, the first lm_head\.weight"):
        await check_reload(llm, "weights/0")


TENSORS = [
    weights_pb2.TensorDescription(name="a", dtype="bfloat16", shape=[2, 3]),
    weights_pb2.TensorDescription(name="b", dtype="float32", shape=[4]),
    weights_pb2.TensorDescription(name="c", dtype="bfloat16", shape=[1]),
]


def delivery():
    return Delivery(
        rollout_pb2.TransferBegin(
            group="g", weights=weights_pb2.WeightVersion(version=4, fingerprint="four"), tensors=TENSORS
        )
    )


async def handed(llm, sent, *parts, finish=True):
    """What `receive` did with these parts."""
    task = asyncio.create_task(receive(llm, sent))
    for part in parts:
        await sent.asked()
        sent.hand(part)
    if finish:
        sent.finish()
    else:
        sent.abandon()
    await task


def part(first, count):
    return rollout_pb2.TransferPart(first=first, count=count)


async def test_parts_are_loaded_between_start_and_finish():
    llm = FakeLlm()
    await handed(llm, delivery(), part(0, 2), part(2, 1))
    assert [name for name, *_ in llm.calls] == [
        "start_weight_update",
        "trivet_receive",
        "trivet_receive",
        "trivet_finish_update",
    ]
    assert llm.calls[1][1] == {"names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], [4]]}
    assert llm.calls[2][1]["names"] == ["c"]


async def test_a_sender_that_gives_up_before_the_first_part_leaves_the_weights_alone():
    llm = FakeLlm()
    with pytest.raises(LoadFailed) as failure:
        await handed(llm, delivery(), finish=False)
    assert failure.value.code == "transfer_abandoned"
    assert llm.calls == []


async def test_a_sender_that_gives_up_later_leaves_neither_old_weights_nor_new():
    llm = FakeLlm()
    with pytest.raises(Unavailable, match="gave up version 4"):
        await handed(llm, delivery(), part(0, 2), finish=False)
    assert [name for name, *_ in llm.calls] == ["start_weight_update", "trivet_receive"]


async def test_a_worker_that_waits_for_a_sender_that_is_gone_is_not_waited_for():
    """As in a broadcast whose other end is dead: the call into vLLM never returns."""
    llm, sent = FakeLlm(), delivery()
    entered = asyncio.Event()

    async def hang(method, args=(), kwargs=None):
        if method == "trivet_receive":
            entered.set()
            await asyncio.Event().wait()

    llm.collective_rpc = hang
    task = asyncio.create_task(receive(llm, sent))
    await sent.asked()
    sent.hand(part(0, 3))
    await entered.wait()
    sent.abandon()
    with pytest.raises(Unavailable, match="gave up version 4"):
        await asyncio.wait_for(task, 5)


@pytest.mark.parametrize(
    "parts", [[part(0, 2)], [part(1, 2)], [part(0, 2), part(0, 1)], [part(0, 4)], [part(0, 0)]], ids=str
)
async def test_parts_that_are_not_what_was_announced_end_the_update(parts):
    llm = FakeLlm()
    with pytest.raises(InvalidData) as failure:
        await handed(llm, delivery(), *parts)
    assert failure.value.code == "transfer_parts"
    assert "trivet_finish_update" not in [name for name, *_ in llm.calls]


def test_tensors_are_announced_once_and_in_a_dtype_that_weights_have():
    begin = delivery().begin
    assert announced_layout(begin) == {"a": (2, 3), "b": (4,), "c": (1,)}
    begin.tensors.add(name="a", dtype="float32", shape=[1])
    with pytest.raises(InvalidData, match="tensor a is announced twice"):
        announced_layout(begin)
    begin.tensors[-1].CopyFrom(weights_pb2.TensorDescription(name="d", dtype="load", shape=[1]))
    with pytest.raises(InvalidData, match="tensor d has dtype 'load', expected one of"):
        announced_layout(begin)


NCCL = rollout_pb2.JoinTransferRequest(
    group="g", nccl=rollout_pb2.NcclTransfer(unique_id=bytes(range(128)), world_size=5, rank_offset=3, buffer_bytes=99)
)
IPC = rollout_pb2.JoinTransferRequest(group="g", ipc=rollout_pb2.IpcTransfer())


async def test_joining_leaves_the_group_before():
    llm = FakeLlm()
    await join(llm, IPC)
    assert llm.calls == [("shutdown_weight_transfer_engine",), ("init_weight_transfer_engine", {"packed": True})]


def buffered():
    sent = delivery()
    sent.received = 2
    buffer = rollout_pb2.CudaBuffer(
        device="GPU-1",
        device_index=4,
        size=28,
        storage_handle=b"h" * 64,
        storage_size=512,
        storage_offset=256,
        reference_counter_handle=b"/torch_1",
        reference_counter_offset=7,
        event_handle=b"e" * 64,
        event_sync_required=True,
    )
    return update_info(sent, rollout_pb2.TransferPart(first=0, count=2, buffer=buffer))


def test_what_crosses_to_the_worker_is_plain():
    """vLLM's own ipc payload holds classes, which it moves by pickle and only where that is allowed."""

    def plain(value):
        if isinstance(value, dict):
            return all(isinstance(key, str) and plain(each) for key, each in value.items())
        if isinstance(value, list):
            return all(map(plain, value))
        return type(value) in {str, int, bytes, bool}

    assert plain(buffered())
    assert plain(init_info(NCCL))


def test_the_messages_are_those_of_vllms_engines():
    """Field for field, from the installed source: importing vLLM takes longer than all of these tests."""
    from services.rollout.vllm_engine.cuda_ipc import opened_by_vllm

    nccl = fields("distributed/weight_transfer/nccl_common.py", "NCCLWeightTransferInitInfo")
    assert init_info(NCCL).keys() == nccl - {"master_address", "master_port", "packed_num_buffers"}
    assert init_info(IPC).keys() == fields("distributed/weight_transfer/ipc_engine.py", "IPCWeightTransferInitInfo")
    opened = opened_by_vllm(buffered())
    update = fields("distributed/weight_transfer/ipc_engine.py", "IPCWeightTransferUpdateInfo")
    assert opened.keys() == update - {"ipc_handles_pickled"}
    assert opened["tensor_sizes"] == [12, 16]
    without = {name: value for name, value in buffered().items() if name != "buffer"}
    assert without.keys() == fields("distributed/weight_transfer/nccl_engine.py", "NCCLWeightTransferUpdateInfo")


def test_a_buffer_is_opened_with_torchs_own_arguments():
    import inspect

    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    from services.rollout.vllm_engine.cuda_ipc import rebuild_arguments

    bound = inspect.signature(rebuild_cuda_tensor).bind(*rebuild_arguments(buffered()["buffer"])).arguments
    assert (bound["tensor_size"], bound["tensor_stride"], bound["tensor_offset"]) == ((28,), (1,), 0)
    assert (bound["storage_device"], bound["storage_handle"]) == (4, b"h" * 64)
    assert (bound["storage_size_bytes"], bound["storage_offset_bytes"]) == (512, 256)
    assert (bound["ref_counter_handle"], bound["ref_counter_offset"]) == (b"/torch_1", 7)
    assert (bound["event_handle"], bound["event_sync_required"], bound["requires_grad"]) == (b"e" * 64, True, False)


def test_the_calls_are_those_that_vllm_has():
    methods = functions("v1/engine/async_llm.py", "AsyncLLM")
    assert {"collective_rpc", "update_weight_version", "pause_generation", "resume_generation"} <= methods.keys()
    assert "reset_running_requests" in methods["reset_prefix_cache"]
    worker = functions("v1/worker/gpu_worker.py", "Worker")
    assert {"start_weight_update", "finish_weight_update", "shutdown_weight_transfer_engine"} <= worker.keys()
    assert worker["init_weight_transfer_engine"] == ["self", "init_info"]
    assert worker["update_weights"] == ["self", "update_info"]


def vllm_class(path, name):
    origin = importlib.util.find_spec("vllm").origin
    tree = ast.parse((Path(origin).parent / path).read_text(encoding="utf-8"))
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return found


def functions(path, name):
    """Argument names by function name."""
    return {
        node.name: [argument.arg for argument in node.args.args]
        for node in vllm_class(path, name).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def fields(path, name):
    return {node.target.id for node in vllm_class(path, name).body if isinstance(node, ast.AnnAssign)}
