"""A model that is sharded while it is read: no rank ever holds more than its shard and one whole parameter."""

import copy
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from services.common.errors import InvalidData
from services.trainer.model.sharding import Sharding

_READ_IN_TURN = "HF_DEACTIVATE_ASYNC_LOAD"


class StoredTensor:
    """Read when it is indexed with `...`, as transformers does when its turn has come."""

    def __init__(self, file: Any, name: str, placeholder: torch.dtype | None) -> None:
        self._file, self._name, self._placeholder = file, name, placeholder

    def __getitem__(self, everything: EllipsisType) -> Tensor:
        if self._placeholder is None:
            return self._values()
        return torch.zeros((), dtype=self._placeholder).expand(self._file.get_slice(self._name).get_shape())

    def _values(self) -> Tensor:
        tensor: Tensor = self._file.get_tensor(self._name)
        return tensor


def stored_tensors(directory: Path, *, reads: bool, dtype: torch.dtype) -> dict[str, StoredTensor]:
    """By the names on disk. Without `reads` each gives zeros of its shape in `dtype`, which take no memory.

    Raises InvalidData where there are no safetensors.
    """
    placeholder = None if reads else dtype
    found = {}
    for path in _files(directory):
        # pread: the pages of a mapped file would count as this process's memory until others need them.
        file: Any = safe_open(path, framework="pt", backend="pread")
        for name in file.keys():  # noqa: SIM118
            found[name] = StoredTensor(file, name, placeholder)
    return found


def read_sharded(directory: Path, config: Any, dtype: torch.dtype, sharding: Sharding, **chosen: Any) -> Any:
    """As AutoModelForCausalLM.from_pretrained, fused experts and tied weights included, parameters in `dtype`.

    Only the rank that reads opens weights; the others go through the same steps with shapes. Buffers are whole on every
    rank. Raises InvalidData as stored_tensors does, and where weights that the configuration ties are two.
    """
    family = _family(config)
    own = config if isinstance(config, family.config_class) else config.get_text_config()
    weights = stored_tensors(directory, reads=sharding.reads, dtype=dtype)
    with _read_in_turn(), _cut_once_read(sharding, dtype):
        model = family.from_pretrained(None, config=own, state_dict=weights, dtype=dtype, **chosen)
    sharding.shard(model.parameters(), dtype)
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            # Without reading it takes no memory of its own yet.
            setattr(module, name, buffer.contiguous())
    sharding.share(model.buffers())
    return model


def _files(directory: Path) -> list[Path]:
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

    if (directory / SAFE_WEIGHTS_NAME).is_file():
        return [directory / SAFE_WEIGHTS_NAME]
    index = directory / SAFE_WEIGHTS_INDEX_NAME
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise InvalidData(
            "weights_missing",
            f"{directory} has neither {SAFE_WEIGHTS_NAME} nor a {SAFE_WEIGHTS_INDEX_NAME} that can be read ({error}); "
            "ZeRO-3 reads its weights from safetensors",
        ) from error
    return [directory / name for name in sorted(names)]


def _family(config: Any) -> Any:
    """The class that the auto class picks; the auto class itself reads weights from nothing but a path."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return type(AutoModelForCausalLM.from_config(copy.deepcopy(config)))


@contextmanager
def _cut_once_read(sharding: Sharding, dtype: torch.dtype) -> Iterator[None]:
    def shard(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # transformers marks what it has read; a model under construction is without marks, and on the meta device.
        if parameter is None or parameter.is_meta or not getattr(parameter, "_is_hf_initialized", False):
            return
        sharding.shard([parameter], dtype)
        present = module._parameters.get(name)
        if present is not None and present is not parameter and sharding.is_sharded(present):
            _check_tied(name, present, parameter, sharding)

    handle = register_module_parameter_registration_hook(shard)
    try:
        yield
    finally:
        handle.remove()


def _check_tied(name: str, present: nn.Parameter, parameter: nn.Parameter, sharding: Sharding) -> None:
    with sharding.whole([present, parameter]):
        equal = torch.equal(present, parameter)
    if not equal:
        raise InvalidData(
            "weights_ambiguous",
            f"the model's configuration ties its output matrix, but the weights hold another {name} for it; expected "
            "equal ones, or tie_word_embeddings false in config.json",
        )


@contextmanager
def _read_in_turn() -> Iterator[None]:
    """Else transformers' threads read ahead of what is being sharded, up to the whole model."""
    before = os.environ.get(_READ_IN_TURN)
    os.environ[_READ_IN_TURN] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_READ_IN_TURN]
        else:
            os.environ[_READ_IN_TURN] = before
