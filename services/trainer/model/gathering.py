"""A forward and backward of a model whose parameters are sharded, before any engine has taken it.

A layer is whole while it computes; nothing of it stays for backward, which gathers it again: what autograd saves of a
parameter is replaced by where to find it.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from services.trainer.model.sharding import Sharding


@contextmanager
def gathered_by_layer(model: nn.Module, sharding: Sharding | None) -> Iterator[None]:
    """Inside, `model` computes as if it were whole on each rank, one layer at a time; backward included."""
    if sharding is None:
        yield
        return
    layers = list(_layers(model))
    gathering = _Gathering(sharding, [parameters for _, parameters in layers])
    with ExitStack() as hooks:
        for number, (module, _) in enumerate(layers):
            hooks.callback(module.register_forward_pre_hook(gathering.entering(number)).remove)
            hooks.callback(module.register_forward_hook(gathering.leaving(number), always_call=True).remove)
        hooks.callback(gathering.close)
        hooks.enter_context(saved_tensors_hooks(gathering.save, gathering.restore))
        yield


def _layers(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """The items of module lists, whole, because a layer may read its children's weights itself; else owners."""
    own = list(module.parameters(recurse=False))
    if own:
        yield module, own
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from ((item, list(item.parameters())) for item in child if any(True for _ in item.parameters()))
        else:
            yield from _layers(child)


class _Place(NamedTuple):
    """Of a tensor within the storage of a whole parameter."""

    layer: int
    parameter: nn.Parameter
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Gathering:
    def __init__(self, sharding: Sharding, layers: Sequence[list[nn.Parameter]]) -> None:
        self._sharding, self._layers = sharding, layers
        self._open: dict[int, ExitStack] = {}
        self._owners: dict[int, tuple[int, nn.Parameter]] = {}
        self._restored: tuple[int, dict[int, Tensor]] = (-1, {})

    def entering(self, layer: int) -> Any:
        def hook(_module: nn.Module, _arguments: Any) -> None:
            parameters = self._layers[layer]
            stack = ExitStack()
            stack.enter_context(self._sharding.whole(parameters))
            self._open[layer] = stack
            self._owners |= {parameter.untyped_storage().data_ptr(): (layer, parameter) for parameter in parameters}

        return hook

    def leaving(self, layer: int) -> Any:
        def hook(_module: nn.Module, _arguments: Any, _output: Any) -> None:
            self._leave(layer)

        return hook

    def close(self) -> None:
        for layer in list(self._open):
            self._leave(layer)
        self._restored = (-1, {})

    def save(self, tensor: Tensor) -> Tensor | _Place:
        owner = self._owners.get(tensor.untyped_storage().data_ptr())
        if owner is None:
            return tensor
        layer, parameter = owner
        offset = int(tensor.storage_offset() - parameter.storage_offset())
        return _Place(layer, parameter, tuple(tensor.size()), tensor.stride(), offset)

    def restore(self, saved: Tensor | _Place) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        data = self._again(saved.layer, saved.parameter)
        return data.as_strided(saved.size, saved.stride, data.storage_offset() + saved.offset)

    def _leave(self, layer: int) -> None:
        self._owners = {place: owner for place, owner in self._owners.items() if owner[0] != layer}
        self._open.pop(layer).close()

    def _again(self, layer: int, parameter: nn.Parameter) -> Tensor:
        """Backward goes through the layers one after another, and may ask for a parameter many times over."""
        current, kept = self._restored
        if current != layer:
            kept = {}
            self._restored = (layer, kept)
        if id(parameter) not in kept:
            with torch.no_grad(), self._sharding.whole([parameter]):
                kept[id(parameter)] = parameter.detach()
        return kept[id(parameter)]
