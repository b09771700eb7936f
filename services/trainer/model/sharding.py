"""Models whose parameters are sharded over the ranks as they are read: what the trainer needs of ZeRO-3."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Sharding(Protocol):
    """All ranks call each method, with parameters of the same shapes in the same order."""

    @property
    def reads(self) -> bool:
        """Whether this rank's values count when parameters are sharded; of the other ranks only the shapes do."""
        ...

    def is_sharded(self, parameter: Tensor) -> bool: ...

    def shard(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
        """In place: each rank keeps its part. Skips what is sharded already."""
        ...

    def whole(self, parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
        """Inside, each rank holds them whole; not to be changed there."""
        ...

    def share(self, tensors: Iterable[Tensor]) -> None:
        """In place: the values of the rank that reads."""
        ...

    def inference(self, module: nn.Module) -> nn.Module:
        """`module` for forward passes without gradients: what is sharded is gathered as it is needed."""
        ...


def whole_shape(parameter: Tensor) -> torch.Size:
    """Of a parameter that may be sharded: DeepSpeed leaves nothing in the parameter itself."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def whole(parameters: Iterable[Any], sharding: Sharding | None) -> AbstractContextManager[None]:
    return nullcontext() if sharding is None else sharding.whole(parameters)
