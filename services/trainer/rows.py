"""Rows of any source, in an order that the seed alone decides."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from services.common.config import DataConfig, PreferenceSourceConfig, SourceConfig
from services.common.errors import InvalidData

Row_co = TypeVar("Row_co", covariant=True)
Message = dict[str, str]


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that data need."""

    @property
    def eos_token_id(self) -> int | None: ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class RowSet(Generic[Row_co]):
    """Rows in an order that the seed alone decides: issue i is always the same row, so a cursor is the whole state."""

    rows: Sequence[Row_co]
    seed: int
    shuffle: bool

    def __getitem__(self, issue: int) -> Row_co:
        epoch, position = divmod(issue, len(self.rows))
        return self.rows[row_order(self.seed, epoch, len(self.rows))[position]] if self.shuffle else self.rows[position]

    def __len__(self) -> int:
        return len(self.rows)


@lru_cache(maxsize=4)
def row_order(seed: int, epoch: int, size: int) -> list[int]:
    return np.random.default_rng([seed, epoch]).permutation(size).tolist()  # type: ignore[no-any-return]


def split_off(size: int, ratio: float, seed: int) -> tuple[list[int], list[int]]:
    """Row numbers to train on and to hold out: the latter a share of `ratio`, one at least."""
    held_out = set(row_order(seed, 0, size)[: max(1, round(size * ratio))])
    return [index for index in range(size) if index not in held_out], sorted(held_out)


def tokenize_prompt(messages: Sequence[Message], config: DataConfig, tokenizer: Tokenizer) -> list[int]:
    """With the chat template, or the last message's text as it stands (data.chat_template: false)."""
    if not config.chat_template:
        return tokenizer.encode(messages[-1]["content"])
    conversation = list(messages)
    if config.system_prompt is not None:
        conversation.insert(0, {"role": "system", "content": config.system_prompt})
    token_ids: list[int] = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return token_ids


def read_rows(source: SourceConfig | PreferenceSourceConfig) -> Iterator[dict[str, Any]]:
    """Rows as dictionaries with an "id"."""
    for index, row in enumerate(_read(source)):
        if source.size is not None and index >= source.size:
            return
        yield {"id": row.get("id", index), **row}


def _read(source: SourceConfig | PreferenceSourceConfig) -> Iterator[dict[str, Any]]:
    if source.kind == "jsonl":
        return _read_jsonl(source)
    if source.kind == "hf":
        return _read_hf(source)
    assert isinstance(source, SourceConfig)
    return _read_reasoning_gym(source)


def _read_jsonl(source: SourceConfig | PreferenceSourceConfig) -> Iterator[dict[str, Any]]:
    path = Path(source.path)
    if not path.is_file():
        raise InvalidData("data_missing", f"data file {path} does not exist")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise InvalidData("data_json", f"{path} line {number} is not JSON ({error})") from error
            if not isinstance(row, dict):
                raise InvalidData("data_json", f"{path} line {number} is {type(row).__name__}, expected an object")
            yield row


def _read_hf(source: SourceConfig | PreferenceSourceConfig) -> Iterator[dict[str, Any]]:
    import datasets

    if (Path(source.path) / "dataset_dict.json").is_file() or (Path(source.path) / "dataset_info.json").is_file():
        loaded = datasets.load_from_disk(source.path)
        dataset = loaded[source.split] if isinstance(loaded, datasets.DatasetDict) else loaded
    else:
        dataset = datasets.load_dataset(source.path, split=source.split, **source.options)
    for row in dataset:
        yield dict(row)


def _read_reasoning_gym(source: SourceConfig) -> Iterator[dict[str, Any]]:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(source.path, size=source.size, **source.options)
    for row in dataset:
        # The scorer asks the task itself, which wants its own fields back unchanged.
        yield {source.prompt_field: row["question"], "answer": row["answer"], "metadata": row["metadata"]}
