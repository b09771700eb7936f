"""Prompts of the train and the validation split, tokenized once."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.config import DataConfig, SourceConfig
from services.common.errors import InvalidData
from services.common.lineage import data_version
from services.trainer.rows import RowSet, Tokenizer, read_rows, split_off, tokenize_prompt


@dataclass(frozen=True)
class PromptRow:
    prompt_id: str
    text: str
    token_ids: list[int]
    metadata_json: str


PromptSet = RowSet[PromptRow]


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
    source = config.prompts
    raw = list(read_rows(source))
    if config.validation is None:
        kept, held_out = split_off(len(raw), config.validation_ratio, seed)
        raw, raw_validation = [raw[index] for index in kept], [raw[index] for index in held_out]
    else:
        raw_validation = list(read_rows(config.validation))
    validation = _rows("validation", config.validation or source, raw_validation, config, tokenizer)
    held_out_texts = {row.text for row in validation}
    train = _rows("train", source, raw, config, tokenizer, without=held_out_texts)
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
    token_ids = tokenize_prompt([{"role": "user", "content": text}], config, tokenizer)
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


def _refuse_duplicates(rows: Sequence[PromptRow], source: SourceConfig) -> None:
    seen: set[str] = set()
    for row in rows:
        if row.prompt_id in seen:
            raise InvalidData("data_duplicate", f"{source.path}: two rows have the id {row.prompt_id!r}")
        seen.add(row.prompt_id)
