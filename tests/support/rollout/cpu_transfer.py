"""vLLM's own receiving engines on a CPU: TCP stands in for NCCL, a file in memory for a buffer of a GPU.

vLLM's worker imports this module by name (`worker_extension_cls`); nothing of what it loads weights with is replaced.
"""

import contextlib
import json
import mmap
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from trivet.v1 import rollout_pb2

DEVICE = "cpu-0"
SECONDS = 60


def new_unique_id():
    """The place of a meeting, as NCCL's ids are: rank 0 listens there."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(SECONDS)
    _LISTENERS[listener.getsockname()[1]] = listener
    return json.dumps({"port": listener.getsockname()[1]}).encode().ljust(128)


_LISTENERS = {}


class Sender:
    """Rank 0."""

    def __init__(self, unique_id, world_size):
        with _LISTENERS.pop(json.loads(unique_id)["port"]) as listener:
            self._peers = [listener.accept()[0] for _ in range(world_size - 1)]
        for peer in self._peers:
            peer.settimeout(SECONDS)
            # All are there: NCCL's first all-reduce.
            peer.sendall(b"!")

    def broadcast(self, buffer):
        for peer in self._peers:
            # What NCCL does with a peer that has ended: nothing, until the communicator is aborted.
            with contextlib.suppress(OSError):
                peer.sendall(buffer.numpy().tobytes())

    def synchronize(self): ...

    def abort(self):
        for peer in self._peers:
            peer.close()


class Receiver:
    """Any other rank; the methods are those of vLLM's PyNcclCommunicator that its engine calls."""

    def __init__(self, unique_id, rank, world_size):
        assert 0 < rank < world_size
        self._peer = socket.create_connection(("127.0.0.1", json.loads(unique_id)["port"]), timeout=SECONDS)
        assert self._peer.recv(1) == b"!"

    def broadcast(self, tensor, src, stream=None):
        assert src == 0
        data = bytearray(tensor.numel())
        view, got = memoryview(data), 0
        while got < len(data):
            count = self._peer.recv_into(view[got:])
            if count == 0:
                raise RuntimeError("the sender has ended")
            got += count
        tensor.copy_(torch.frombuffer(data, dtype=torch.uint8))

    def destroy(self):
        self._peer.close()


class Buffer:
    """What the trainer's side of ipc needs of CUDA: an export of a buffer that another process can open."""

    def __init__(self):
        self.exports = 0

    def export(self, buffer):
        self.exports += 1
        self._buffer = buffer
        self._file = Path(tempfile.mkstemp(prefix="trivet-buffer-")[1])
        self.synchronize()
        return rollout_pb2.CudaBuffer(
            device=DEVICE, device_index=3, size=buffer.numel(), storage_handle=str(self._file).encode(), storage_size=1
        )

    def synchronize(self):
        self._file.write_bytes(self._buffer.numpy().tobytes())

    def collect(self):
        if self.exports:
            self._file.unlink()


def open_buffer(*arguments):
    """In the place of torch's rebuild_cuda_tensor, with its arguments."""
    size, dtype, device, handle = arguments[1], arguments[5], arguments[6], arguments[7]
    assert (dtype, device) == (torch.uint8, 0)
    with open(handle, "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), size[0]), dtype=torch.uint8)


def register():
    from vllm.distributed.weight_transfer import factory, packed_tensor
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    @contextlib.contextmanager
    def without_cuda():
        stream = SimpleNamespace(synchronize=lambda: None)
        properties = SimpleNamespace(uuid=DEVICE)
        with (
            mock.patch.object(packed_tensor, "_get_streams", lambda _, count: [stream] * count),
            mock.patch.object(torch.cuda, "stream", return_value=contextlib.nullcontext()),
            mock.patch.object(torch.accelerator, "current_device_index", return_value=0),
            mock.patch.object(torch.accelerator, "synchronize"),
            mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
            mock.patch("torch.multiprocessing.reductions.rebuild_cuda_tensor", open_buffer),
        ):
            yield

    class Tcp(NCCLWeightTransferEngine):
        def init_transfer_engine(self, init_info):
            def meet(unique_id, rank, world_size, device):
                return Receiver(unique_id, rank, world_size)

            with (
                without_cuda(),
                mock.patch("vllm.distributed.weight_transfer.nccl_common.uid_init_process_group", meet),
            ):
                super().init_transfer_engine(init_info)

        def update_weights(self, update_info):
            with without_cuda():
                super().update_weights(update_info)

    class File(IPCWeightTransferEngine):
        def update_weights(self, update_info):
            self.device = SimpleNamespace(index=0)
            with without_cuda():
                super().update_weights(update_info)

    registry = factory.WeightTransferEngineFactory._registry
    registry["nccl"], registry["ipc"] = lambda: Tcp, lambda: File


def report_logprobs_as(worker, mode):
    """On CPUs vLLM's sampler asks for its mode at every step."""
    worker.model_runner.sampler.logprobs_mode = mode
    worker.model_runner.sampler.topk_topp_sampler.logprobs_mode = mode


def __getattr__(name):
    """The extension only where vLLM asks for it: the trainer's side needs no vLLM."""
    if name != "Extension":
        raise AttributeError(name)
    from services.rollout.vllm_engine.worker_extension import CaptureExtension

    register()
    return type("Extension", (CaptureExtension,), {"report_logprobs_as": report_logprobs_as})
