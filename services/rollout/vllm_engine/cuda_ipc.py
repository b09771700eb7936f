"""Another process's GPU memory, opened by torch. Plain fields cross the processes, never pickled objects."""

import math
from typing import Any

import torch


def opened_by_vllm(info: dict[str, Any]) -> dict[str, Any]:
    """`info` with "buffer", as the fields of vLLM's IPCWeightTransferUpdateInfo."""
    buffer = info["buffer"]
    sizes = [
        math.prod(shape) * getattr(torch, dtype).itemsize
        for shape, dtype in zip(info["shapes"], info["dtype_names"], strict=True)
    ]
    return {
        **{name: value for name, value in info.items() if name != "buffer"},
        "tensor_sizes": sizes,
        "ipc_handles": {buffer["device"]: rebuild_arguments(buffer)},
    }


def rebuild_arguments(buffer: dict[str, Any]) -> tuple[Any, ...]:
    """Of torch.multiprocessing.reductions.rebuild_cuda_tensor, for a buffer of bytes."""
    return (
        torch.Tensor,
        torch.Size([buffer["size"]]),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        buffer["device_index"],
        buffer["storage_handle"],
        buffer["storage_size"],
        buffer["storage_offset"],
        False,
        buffer["reference_counter_handle"],
        buffer["reference_counter_offset"],
        buffer["event_handle"],
        buffer["event_sync_required"],
    )
