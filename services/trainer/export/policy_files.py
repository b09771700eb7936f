"""A Hugging Face checkpoint from gathered parameters."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from trivet.v1.weights_pb2 import TensorDescription

from services.common.errors import InvalidData
from services.trainer.export.tensors import WeightSource, size
from services.trainer.model.sharding import Sharding

WEIGHTS = "model"
FILE_BYTES = 5_000_000_000
# safetensors writes for its owner alone; rollouts in containers run as other users.
READABLE = 0o644

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "*.model",
    "chat_template*",
    "generation_config.json",
)


def write_model(model: Any, state: Mapping[str, Tensor], directory: Path) -> None:
    """Safetensors under the hub's own names, with configuration; `state` holds every parameter whole, on the CPU."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, state_dict=dict(state))
    for weights in directory.glob("*.safetensors"):
        weights.chmod(READABLE)


def separate_tensors(model: Any, sharding: Sharding | None) -> WeightSource | None:
    """None if a checkpoint's tensors cannot be derived one parameter after the other."""
    if getattr(model, "_keys_to_ignore_on_save", None):
        return None
    try:
        return WeightSource(model, sharding)
    except InvalidData:
        return None


def stream_model(model: Any, source: WeightSource, directory: Path, *, file_bytes: int = FILE_BYTES) -> None:
    """As write_model, file by file: at most `file_bytes` are in memory at a time, or one tensor where that is more.

    Where one file holds everything it is the one that write_model writes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # The configuration alone.
    model.save_pretrained(directory, state_dict={})
    files = _files(source.tensors, file_bytes)
    held: dict[str, Tensor] = {}
    for (name, tensor), file, following in zip(source, files, [*files[1:], None], strict=True):
        held[name] = tensor.to("cpu", copy=True).contiguous()
        if file != following:
            save_file(held, directory / file, metadata={"format": "pt"})
            (directory / file).chmod(READABLE)
            held = {}
    if len(set(files)) > 1:
        placed = dict(zip((tensor.name for tensor in source.tensors), files, strict=True))
        index = {"metadata": {"total_size": source.total_bytes}, "weight_map": dict(sorted(placed.items()))}
        path = directory / f"{WEIGHTS}.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _files(tensors: Sequence[TensorDescription], file_bytes: int) -> list[str]:
    """The file of each tensor, in their order."""
    numbers, number, filled = [], 1, 0
    for tensor in tensors:
        taken = size(tensor)
        if filled and filled + taken > file_bytes:
            number, filled = number + 1, 0
        filled += taken
        numbers.append(number)
    if number == 1:
        return [f"{WEIGHTS}.safetensors"] * len(numbers)
    return [f"{WEIGHTS}-{each:05}-of-{number:05}.safetensors" for each in numbers]


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Byte for byte: saving a loaded tokenizer again may rewrite it."""
    for pattern in TOKENIZER_FILES:
        for path in sorted(source.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, directory / path.name)
