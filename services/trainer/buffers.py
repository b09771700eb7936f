"""Buffers through deepspeed.initialize."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def keeping_buffers(module: nn.Module) -> Iterator[None]:
    """DeepSpeed may cast buffers with the parameters; rotary frequencies and routing biases need their digits."""
    originals = {name: buffer.clone() for name, buffer in module.named_buffers()}
    yield
    for name, original in originals.items():
        owner, _, leaf = name.rpartition(".")
        holder = module.get_submodule(owner)
        current = holder.get_buffer(leaf)
        if current.dtype != original.dtype:
            holder._buffers[leaf] = original.to(current.device)
