"""A Hugging Face checkpoint from gathered parameters."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

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
        # safetensors writes for its owner alone; rollouts in containers run as other users.
        weights.chmod(0o644)


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Byte for byte: saving a loaded tokenizer again may rewrite it."""
    for pattern in TOKENIZER_FILES:
        for path in sorted(source.glob(pattern)):
            if path.is_file():
                shutil.copyfile(path, directory / path.name)
