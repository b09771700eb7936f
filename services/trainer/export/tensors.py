"""The policy's weights as they leave the trainer: whole, in one fixed order, under the hub's own names."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from trivet.v1 import weights_pb2

from services.common.errors import InvalidData
from services.trainer.model.sharding import Sharding, whole, whole_shape


def whole_tensors(model: nn.Module, sharding: Sharding | None) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers under the model's names, module by module; tied ones once.

    Collective if the model is sharded: every rank iterates to the end. A tensor is whole only until the next one is
    asked for.
    """
    for name, tensor in _named(model):
        with whole([tensor], sharding if sharding is not None and sharding.is_sharded(tensor) else None):
            yield name, tensor.detach()


class WeightSource:
    """Iterates (name, tensor) afresh for each version. Under the hub's names one parameter may be many tensors."""

    def __init__(self, model: Any, sharding: Sharding | None) -> None:
        """Raises InvalidData for a model whose hub tensors are made of several parameters each."""
        self._model, self._sharding = model, sharding
        # Without data: names and shapes alone.
        shapes = {
            name: torch.empty(whole_shape(tensor), dtype=tensor.dtype, device="meta") for name, tensor in _named(model)
        }
        described = [pair for name, tensor in shapes.items() for pair in _hub_tensors(model, {name: tensor})]
        expected = dict(_hub_tensors(model, shapes))
        if {name: tensor.shape for name, tensor in described} != {
            name: tensor.shape for name, tensor in expected.items()
        }:
            raise InvalidData(
                "weights_transfer",
                f"weights.transfer is not possible for {type(model).__name__}, expected disk: "
                "its checkpoint's tensors are made of several parameters each",
            )
        self.tensors = [describe(name, tensor) for name, tensor in described]

    @property
    def total_bytes(self) -> int:
        return sum(map(size, self.tensors))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """In the order of `tensors`. Collective, as `whole_tensors` is."""
        for name, tensor in whole_tensors(self._model, self._sharding):
            yield from _hub_tensors(self._model, {name: tensor})

    def gather(self) -> None:
        """A rank's part in an iteration that another one reads."""
        for _ in whole_tensors(self._model, self._sharding):
            pass


def describe(name: str, tensor: Tensor) -> weights_pb2.TensorDescription:
    return weights_pb2.TensorDescription(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tensor.shape)


def size(tensor: weights_pb2.TensorDescription) -> int:
    """Bytes."""
    return math.prod(tensor.shape) * int(getattr(torch, tensor.dtype).itemsize)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _hub_tensors(model: Any, state: dict[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    from transformers.core_model_loading import revert_weight_conversion

    reverted: dict[str, Tensor] = revert_weight_conversion(model, state)
    return reverted.items()
