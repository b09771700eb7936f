"""Tensors side by side in one buffer of bytes, split as vLLM's receivers split it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from trivet.v1 import weights_pb2

from services.common.errors import InvalidData
from services.trainer.export.tensors import describe, size


@dataclass(frozen=True)
class Part:
    """Tensors [first, first + count), together `bytes` long."""

    first: int
    count: int
    bytes: int


def broadcast_parts(tensors: Sequence[weights_pb2.TensorDescription], buffer_bytes: int) -> list[Part]:
    """A part ends with the tensor that makes it longer than the buffer (vLLM's packed_nccl_broadcast_consumer).

    Raises InvalidData where a tensor would begin between two of its elements.
    """
    parts, first, total = [], 0, 0
    for index, tensor in enumerate(tensors):
        if not _aligned(tensor, total):
            raise InvalidData(
                "weights_transfer",
                f"weights.transfer cannot be nccl, expected disk or ipc: {tensor.name} ({tensor.dtype}) would begin at "
                f"byte {total} of a buffer",
            )
        total += size(tensor)
        if total > buffer_bytes or index == len(tensors) - 1:
            parts.append(Part(first, index + 1 - first, total))
            first, total = index + 1, 0
    return parts


def buffer_parts(tensors: Sequence[weights_pb2.TensorDescription], buffer_bytes: int) -> list[Part]:
    """Parts that fit into the buffer; a tensor that alone is larger is a part of its own."""
    parts, first, total = [], 0, 0
    for index, tensor in enumerate(tensors):
        if index > first and (total + size(tensor) > buffer_bytes or not _aligned(tensor, total)):
            parts.append(Part(first, index - first, total))
            first, total = index, 0
        total += size(tensor)
    return [*parts, Part(first, len(tensors) - first, total)] if tensors else []


def fill(
    buffer: Tensor, part: Part, tensors: Iterator[tuple[str, Tensor]], expected: Sequence[weights_pb2.TensorDescription]
) -> Tensor:
    """Copies the part's tensors out of `tensors` and returns its bytes of `buffer`.

    Raises InvalidData where they are not the expected ones: the receivers would split the bytes in other places.
    """
    offset = 0
    for index in range(part.first, part.first + part.count):
        name, tensor = next(tensors, (None, None))
        description = expected[index]
        if name is None or tensor is None:
            raise InvalidData("transfer_parts", f"the source ended after {index} tensors, expected {len(expected)}")
        if describe(name, tensor) != description:
            raise InvalidData(
                "transfer_parts",
                f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, expected {description.name} "
                f"{description.dtype} {list(description.shape)}",
            )
        flat = tensor.reshape(-1).view(torch.uint8)
        buffer[offset : offset + flat.numel()].copy_(flat)
        offset += flat.numel()
    return buffer[:offset]


def _aligned(tensor: weights_pb2.TensorDescription, offset: int) -> bool:
    return offset % int(getattr(torch, tensor.dtype).itemsize) == 0
