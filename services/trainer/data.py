"""Prompts of the train and the validation split, tokenized once."""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from services.common.config import DataConfig, SourceConfig
from services.common.errors import InvalidData
from services.common.lineage import data_version


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class PromptRow:
    prompt_id: str
    text: str
    token_ids: list[int]
    metadata_json: str


@dataclass(frozen=True)
class PromptSet:
    """Rows in an order that the seed alone decides: issue i is always the same row, so a cursor is the whole state."""

    rows: Sequence[PromptRow]
    seed: int
    shuffle: bool

    def __getitem__(self, issue: int) -> PromptRow:
        epoch, position = divmod(issue, len(self.rows))
        return self.rows[_order(self.seed, epoch, len(self.rows))[position]] if self.shuffle else self.rows[position]

    def __len__(self) -> int:
        return len(self.rows)


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, size: int) -> list[int]:
    return np.random.default_rng([seed, epoch]).permutation(size).tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class PromptData:
    train: PromptSet
    validation: PromptSet
    # Lineage: a digest of every row.
    version: str
    # Rows left out: too long (data.too_long: drop), or in both splits (they stay in validation alone).
    dropped: int


def load_prompts(config: DataConfig, tokenizer: Tokenizer, seed: int) -> PromptData:
    """Raises InvalidData that names the source, the row and the field."""
    raw = list(_read(config.train))
    if config.validation is None:
        size = max(1, round(len(raw) * config.validation_ratio))
        chosen = set(_order(seed, 0, len(raw))[:size])
        raw_validation = [row for index, row in enumerate(raw) if index in chosen]
        raw = [row for index, row in enumerate(raw) if index not in chosen]
    else:
        raw_validation = list(_read(config.validation))
    validation = _rows("validation", config.validation or config.train, raw_validation, config, tokenizer)
    held_out = {row.text for row in validation}
    train = _rows("train", config.train, raw, config, tokenizer, without=held_out)
    version = data_version(f"{row.prompt_id}\0{row.text}\0{row.metadata_json}" for row in train + validation)
    dropped = len(raw) + len(raw_validation) - len(train) - len(validation)
    return PromptData(PromptSet(train, seed, config.shuffle), PromptSet(validation, seed, False), version, dropped)


def _rows(
    split: str,
    source: SourceConfig,
    raw: list[dict[str, Any]],
    config: DataConfig,
    tokenizer: Tokenizer,
    without: Collection[str] = (),
) -> list[PromptRow]:
    """Tokenized, short enough, and none whose text is in `without`: what is held out is never trained on."""
    rows = [row for row in (_row(row, source, config, tokenizer) for row in raw) if row is not None]
    kept = [row for row in rows if row.text not in without]
    if not kept:
        raise InvalidData(
            "data_empty",
            f"data.{split} ({source.path}) has no usable row: of {len(raw)}, {len(raw) - len(rows)} are too long and "
            f"{len(rows) - len(kept)} are held out for validation",
        )
    _refuse_duplicates(kept, source)
    return kept


def _row(raw: dict[str, Any], source: SourceConfig, config: DataConfig, tokenizer: Tokenizer) -> PromptRow | None:
    where = f"{source.path} row {raw['id']}"
    text = raw.pop(source.prompt_field, None)
    if not isinstance(text, str) or not text:
        raise InvalidData("data_prompt", f"{where}: {source.prompt_field} is {text!r}, expected a non-empty string")
    token_ids = _tokenize(text, config, tokenizer)
    if len(token_ids) > config.max_prompt_tokens:
        if config.too_long == "drop":
            return None
        raise InvalidData(
            "prompt_too_long",
            f"{where}: prompt has {len(token_ids)} tokens, at most {config.max_prompt_tokens} allowed "
            "(data.max_prompt_tokens; data.too_long: drop leaves such rows out)",
        )
    try:
        metadata = json.dumps(raw, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidData("data_metadata", f"{where}: the fields beside the prompt are not JSON ({error})") from error
    return PromptRow(str(raw["id"]), text, token_ids, metadata)


def _tokenize(text: str, config: DataConfig, tokenizer: Tokenizer) -> list[int]:
    if not config.chat_template:
        return tokenizer.encode(text)
    conversation = [{"role": "user", "content": text}]
    if config.system_prompt is not None:
        conversation.insert(0, {"role": "system", "content": config.system_prompt})
    token_ids: list[int] = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return token_ids


def _read(source: SourceConfig) -> Iterator[dict[str, Any]]:
    """Rows as dictionaries with an "id"."""
    readers = {"jsonl": _read_jsonl, "hf": _read_hf, "reasoning_gym": _read_reasoning_gym}
    for index, row in enumerate(readers[source.kind](source)):
        if source.size is not None and index >= source.size:
            return
        yield {"id": row.get("id", index), **row}


def _read_jsonl(source: SourceConfig) -> Iterator[dict[str, Any]]:
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


def _read_hf(source: SourceConfig) -> Iterator[dict[str, Any]]:
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


def _refuse_duplicates(rows: Sequence[PromptRow], source: SourceConfig) -> None:
    seen: set[str] = set()
    for row in rows:
        if row.prompt_id in seen:
            raise InvalidData("data_duplicate", f"{source.path}: two rows have the id {row.prompt_id!r}")
        seen.add(row.prompt_id)
