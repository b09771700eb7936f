"""NCCL for one sender. torch.distributed opens no group with processes that join by a unique id alone.

The receiving workers are vLLM's. Their side of the meeting by a unique id, and the all-reduce of one float that follows
it, are those of vllm.distributed.device_communicators.pynccl.
"""

import ctypes
import threading
from typing import Any

import torch
from torch import Tensor

from services.common.errors import Unavailable

LIBRARY = "libnccl.so.2"
UNIQUE_ID_BYTES = 128
# A call that is under way may still end by itself before it is cut off.
ABORT_PATIENCE_SECONDS = 1.0
ABORT_SECONDS = 5.0
_UINT8, _FLOAT32, _SUM, _RANK = 1, 7, 0, 0


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


_POINTER = ctypes.c_void_p
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ncclGetErrorString": (ctypes.c_char_p, [ctypes.c_int]),
    "ncclGetUniqueId": (ctypes.c_int, [ctypes.POINTER(UniqueId)]),
    "ncclCommInitRank": (ctypes.c_int, [ctypes.POINTER(_POINTER), ctypes.c_int, UniqueId, ctypes.c_int]),
    "ncclAllReduce": (
        ctypes.c_int,
        [_POINTER, _POINTER, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _POINTER, _POINTER],
    ),
    "ncclBroadcast": (
        ctypes.c_int,
        [_POINTER, _POINTER, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _POINTER, _POINTER],
    ),
    "ncclCommAbort": (ctypes.c_int, [_POINTER]),
}


def load_library(path: str = LIBRARY) -> Any:
    """That of torch, once torch has loaded it. Raises OSError where there is none."""
    library = ctypes.CDLL(path)
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def new_unique_id(library: Any) -> bytes:
    unique_id = UniqueId()
    _check(library, library.ncclGetUniqueId(ctypes.byref(unique_id)))
    return bytes(unique_id)


class NcclCommunicator:
    """Rank 0 of a group. Broadcasts from the current stream of `device`."""

    def __init__(self, library: Any, unique_id: bytes, world_size: int, device: torch.device) -> None:
        """Blocks until every other rank has joined. Raises Unavailable where NCCL fails."""
        self._library, self._device = library, device
        self._calling = threading.Lock()
        self._comm: ctypes.c_void_p | None = None
        comm = ctypes.c_void_p()
        with torch.cuda.device(device):
            _check(
                library,
                library.ncclCommInitRank(
                    ctypes.byref(comm), world_size, UniqueId.from_buffer_copy(unique_id), ctypes.c_int(_RANK)
                ),
            )
            self._comm = comm
            one = torch.zeros(1, device=device)
            self._call("ncclAllReduce", one.data_ptr(), one.data_ptr(), 1, _FLOAT32, _SUM)
            self.synchronize()

    def broadcast(self, buffer: Tensor) -> None:
        """Enqueues `buffer` of bytes. Raises Unavailable once the communicator is aborted."""
        with torch.cuda.device(self._device):
            self._call("ncclBroadcast", buffer.data_ptr(), buffer.data_ptr(), buffer.numel(), _UINT8, _RANK)

    def synchronize(self) -> None:
        """Returns when what was enqueued has arrived, or was aborted."""
        torch.cuda.current_stream(self._device).synchronize()

    def abort(self) -> None:
        """From any thread, at any time: calls that hang return, and the group is closed."""
        held = self._calling.acquire(timeout=ABORT_PATIENCE_SECONDS)
        comm, self._comm = self._comm, None
        if held:
            self._calling.release()
        if comm is not None:
            # It may wait for kernels of its own that only end with the process.
            aborting = threading.Thread(target=self._abort, args=(comm,), name="nccl-abort", daemon=True)
            aborting.start()
            aborting.join(ABORT_SECONDS)

    def _abort(self, comm: ctypes.c_void_p) -> None:
        with torch.cuda.device(self._device):
            self._library.ncclCommAbort(comm)

    def _call(self, name: str, *arguments: int) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        with self._calling:
            if self._comm is None:
                raise Unavailable("aborted", "the NCCL communicator was aborted")
            _check(self._library, getattr(self._library, name)(*arguments, self._comm, stream))


def _check(library: Any, result: int) -> None:
    if result != 0:
        raise Unavailable("nccl", f"NCCL: {library.ncclGetErrorString(result).decode()}")
