"""Prompts of the train and the validation split, tokenized once."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.config import DataConfig, SourceConfig
from services.common.data.rows import MAX_TEXT_BYTES, Row, metadata, need_column, read_rows, refuse_surrogates
from services.common.errors import InvalidData
from services.common.run_files.lineage import data_version
from services.trainer.data.renderer import Renderer, Tokenizer
from services.trainer.data.rows import RowSet, split_off, use_rows


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
    # Columns of some rows that scorers do not get, because JSON cannot hold them.
    columns_left_out: frozenset[str] = frozenset()


def load_prompts(config: DataConfig, tokenizer: Tokenizer, seed: int, most: int | None = None) -> PromptData:
    """Of at most `most` rows of each source. What is too long is left out before a share is held out.

    Raises InvalidData that names the key, the row and the field, and Unavailable where a hub does not answer.
    """
    renderer = Renderer(config, tokenizer)
    source = config.prompts
    read = _Reading(config, renderer)
    train = read.rows(source, "data.train", most)
    if config.validation is None:
        if len(train) < 2:
            raise _empty(
                f"data.train ({source.path}) has {_counted(len(train))} that can be used, expected at least two: one "
                "is held out (unless data.validation gives rows of its own)",
                read,
            )
        train, validation = split_off(train, config.validation_ratio, seed)
    else:
        validation = read.rows(config.validation, "data.validation", most)
        if not validation:
            raise _empty(f"data.validation ({config.validation.path}) has no row that can be used", read)
    held_out = {row.text for row in validation}
    # What is held out is never trained on.
    kept = [row for row in train if row.text not in held_out]
    if not kept:
        raise _empty(
            f"data.train ({source.path}) has no row that can be used: of {len(train)} rows, all have prompts that are "
            "held out for validation",
            read,
        )
    _refuse_duplicates(validation, config.validation or source)
    _refuse_duplicates(kept, source)
    version = data_version(f"{row.prompt_id}\0{row.text}\0{row.metadata_json}" for row in kept + validation)
    return PromptData(
        PromptSet(kept, seed, config.shuffle),
        PromptSet(validation, seed, False),
        version,
        read.too_long + len(train) - len(kept),
        frozenset(read.columns_left_out),
    )


class _Reading:
    def __init__(self, config: DataConfig, renderer: Renderer) -> None:
        self._config, self._renderer = config, renderer
        self.too_long = 0
        self.columns_left_out: set[str] = set()

    def rows(self, source: SourceConfig, key: str, most: int | None) -> list[PromptRow]:
        """Tokenized and short enough."""
        rows, left_out = use_rows(read_rows(source, key, most), lambda row: self._row(row, source, key))
        self.too_long += left_out
        return rows

    def _row(self, row: Row, source: SourceConfig, key: str) -> PromptRow | None:
        name = source.prompt_field
        text = need_column(row, name, f"{key}.prompt_field")
        if not isinstance(text, str) or not text:
            raise InvalidData("data_prompt", f"{row.where}: {name} is {text!r:.80}, expected a non-empty string")
        prompt_id = str(row.values["id"])
        refuse_surrogates(text, f"{row.where}: {name}")
        refuse_surrogates(prompt_id, f"{row.where}: id")
        token_ids = self._renderer.prompt([{"role": "user", "content": text}])
        if len(token_ids) > self._config.max_prompt_tokens:
            if self._config.too_long == "drop":
                return None
            raise InvalidData(
                "prompt_too_long",
                f"{row.where}: {name} has {len(token_ids)} tokens, at most {self._config.max_prompt_tokens} allowed "
                "(data.max_prompt_tokens; data.too_long: drop leaves such rows out)",
            )
        metadata_json, left_out = metadata(row, name)
        for size, field in ((len(text.encode()), name), (len(metadata_json), "other columns")):
            if size > MAX_TEXT_BYTES:
                raise InvalidData(
                    "data_size", f"{row.where}: {size} bytes of {field}, at most {MAX_TEXT_BYTES} can be scored"
                )
        self.columns_left_out |= left_out
        return PromptRow(prompt_id, text, token_ids, metadata_json)


def _counted(rows: int) -> str:
    return "one row" if rows == 1 else f"{rows or 'no'} rows"


def _empty(problem: str, read: _Reading) -> InvalidData:
    return InvalidData("data_empty", problem + (f"; {read.too_long} are too long" if read.too_long else ""))


def _refuse_duplicates(rows: Sequence[PromptRow], source: SourceConfig) -> None:
    seen: set[str] = set()
    for row in rows:
        if row.prompt_id in seen:
            raise InvalidData("data_duplicate", f"{source.path}: two rows have the id {row.prompt_id!r}")
        seen.add(row.prompt_id)
