"""Preference pairs from a file, tokenized once and checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.common.config import Config, PreferenceSourceConfig
from services.common.errors import InvalidData
from services.common.lineage import data_version
from services.trainer.rows import Message, RowSet, Tokenizer, read_rows, split_off, tokenize_prompt


@dataclass(frozen=True)
class PairRow:
    """Both answers end with the end-of-sequence token, as a sampler ends them."""

    pair_id: str
    text: str
    prompt_token_ids: list[int]
    chosen: str
    chosen_token_ids: list[int]
    rejected: str
    rejected_token_ids: list[int]


@dataclass(frozen=True)
class PreferenceData:
    train: RowSet[PairRow]
    validation: RowSet[PairRow]
    # Lineage: a digest of every row.
    version: str
    # Rows left out: too long (data.too_long: drop), or with the prompt of a held-out pair.
    dropped: int


def load_preferences(config: Config, tokenizer: Tokenizer) -> PreferenceData:
    """A share of data.validation_ratio is held out. Raises InvalidData that names the source, the row and the field."""
    source = config.data.preferences
    if source is None:
        raise InvalidData("data_missing", "data.preferences is missing, expected pairs of answers")
    raw = list(read_rows(source))
    if len(raw) < 2:
        raise InvalidData("data_empty", f"{source.path} has {len(raw)} pairs, expected at least two: one is held out")
    seed = config.run.seed
    rows = [_row(row, source, config, tokenizer) for row in raw]
    kept, held_out = split_off(len(rows), config.data.validation_ratio, seed)
    validation = [row for row in (rows[index] for index in held_out) if row is not None]
    prompts = {row.text for row in validation}
    train = [row for row in (rows[index] for index in kept) if row is not None and row.text not in prompts]
    if not train or not validation:
        raise InvalidData(
            "data_empty",
            f"{source.path}: of {len(raw)} pairs {len(train)} are left to train on and {len(validation)} to hold out, "
            f"expected at least one of each; {sum(row is None for row in rows)} are too long",
        )
    version = data_version(f"{row.pair_id}\0{row.text}\0{row.chosen}\0{row.rejected}" for row in train + validation)
    dropped = len(raw) - len(train) - len(validation)
    return PreferenceData(RowSet(train, seed, config.data.shuffle), RowSet(validation, seed, False), version, dropped)


def _row(raw: dict[str, Any], source: PreferenceSourceConfig, config: Config, tokenizer: Tokenizer) -> PairRow | None:
    where = f"{source.path} row {raw['id']}"
    chosen = _conversation(raw, source.chosen_field, where)
    rejected = _conversation(raw, source.rejected_field, where)
    prompt = _prompt(raw, source, chosen, rejected, where)
    answers = {source.chosen_field: chosen[-1]["content"], source.rejected_field: rejected[-1]["content"]}
    if len(set(answers.values())) == 1:
        raise InvalidData("data_pair", f"{where}: {' and '.join(answers)} are the same, expected two different answers")
    prompt_ids = tokenize_prompt(prompt, config.data, tokenizer)
    token_ids = {name: _answer(text, tokenizer) for name, text in answers.items()}
    lengths = {source.prompt_field: len(prompt_ids), **{name: len(ids) for name, ids in token_ids.items()}}
    if _too_long(lengths, source, config, where):
        return None
    return PairRow(
        str(raw["id"]),
        "\n".join(message["content"] for message in prompt),
        prompt_ids,
        answers[source.chosen_field],
        token_ids[source.chosen_field],
        answers[source.rejected_field],
        token_ids[source.rejected_field],
    )


def _conversation(raw: dict[str, Any], field: str, where: str) -> list[Message]:
    """An answer as text, or as a conversation that ends with it."""
    messages = _messages(raw.get(field), "assistant", field, where)
    if messages[-1]["role"] != "assistant":
        raise InvalidData("data_pair", f"{where}: {field} ends with role {messages[-1]['role']!r}, expected assistant")
    return messages


def _prompt(
    raw: dict[str, Any],
    source: PreferenceSourceConfig,
    chosen: Sequence[Message],
    rejected: Sequence[Message],
    where: str,
) -> list[Message]:
    """Its own field, as text or conversation; without one, what both answers' conversations begin with."""
    value = raw.get(source.prompt_field)
    if value is not None:
        return _messages(value, "user", source.prompt_field, where)
    if chosen[:-1] != rejected[:-1]:
        raise InvalidData(
            "data_pair",
            f"{where}: {source.prompt_field} is missing, and the conversations of {source.chosen_field} and "
            f"{source.rejected_field} differ before their last message",
        )
    return _messages(chosen[:-1], "user", source.prompt_field, where)


def _messages(value: Any, role: str, field: str, where: str) -> list[Message]:
    """A text is one message of `role`."""
    messages = [{"role": role, "content": value}] if isinstance(value, str) else value
    good = (
        isinstance(messages, Sequence)
        and len(messages) > 0
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            and message["content"]
            for message in messages
        )
    )
    if not good:
        raise InvalidData(
            "data_pair",
            f"{where}: {field} is {messages!r:.80}, expected a non-empty text or messages with role and content",
        )
    return list(messages)


def _answer(text: str, tokenizer: Tokenizer) -> list[int]:
    if tokenizer.eos_token_id is None:
        raise InvalidData("data_tokenizer", "the tokenizer has no end-of-sequence token, expected one to end answers")
    return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]


def _too_long(lengths: dict[str, int], source: PreferenceSourceConfig, config: Config, where: str) -> bool:
    for name, length in lengths.items():
        key, most = (
            ("data.max_prompt_tokens", config.data.max_prompt_tokens)
            if name == source.prompt_field
            else ("sampling.max_tokens", config.sampling.max_tokens)
        )
        if length > most:
            if config.data.too_long == "drop":
                return True
            raise InvalidData(
                "pair_too_long",
                f"{where}: {name} has {length} tokens, at most {most} allowed ({key}; data.too_long: drop leaves such "
                "rows out)",
            )
    return False
