"""A model's weights as they lie on disk, one tensor at a time."""

import json
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from services.common.errors import InvalidData


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
