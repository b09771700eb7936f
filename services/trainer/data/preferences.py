"""Preference pairs from a file, tokenized once and checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.common.config import Config, PreferenceSourceConfig
from services.common.data.rows import Row, need_column, read_rows, refuse_surrogates
from services.common.errors import InvalidData
from services.common.run_files.lineage import data_version
from services.trainer.data.renderer import Message, Renderer, Tokenizer
from services.trainer.data.rows import RowSet, split_off, use_rows


@dataclass(frozen=True)
class PairRow:
    """Both answers end with the token that ends a turn in the chat template, else with that of the end of sequence."""

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


def load_preferences(config: Config, tokenizer: Tokenizer, most: int | None = None) -> PreferenceData:
    """Of at most `most` rows. A share of data.validation_ratio is held out, of what is not too long.

    Raises InvalidData that names the key, the row and the field, and Unavailable where a hub does not answer.
    """
    source = config.data.preferences
    if source is None:
        raise InvalidData("data_missing", "data.preferences is missing, expected pairs of answers")
    renderer = Renderer(config.data, tokenizer)
    rows, too_long = use_rows(
        read_rows(source, "data.preferences", most), lambda row: _row(row, source, config, renderer)
    )
    if len(rows) < 2:
        raise InvalidData(
            "data_empty",
            f"data.preferences ({source.path}) has {len(rows)} pairs, expected at least two: one is held out"
            + (f"; {too_long} are too long" if too_long else ""),
        )
    seed = config.run.seed
    train, validation = split_off(rows, config.data.validation_ratio, seed)
    prompts = {row.text for row in validation}
    kept = [row for row in train if row.text not in prompts]
    if not kept:
        raise InvalidData(
            "data_empty",
            f"data.preferences ({source.path}): of {len(rows)} pairs {len(validation)} are held out and none is left "
            "to train on, expected at least one with a prompt that is not held out",
        )
    version = data_version(f"{row.pair_id}\0{row.text}\0{row.chosen}\0{row.rejected}" for row in kept + validation)
    dropped = too_long + len(train) - len(kept)
    return PreferenceData(RowSet(kept, seed, config.data.shuffle), RowSet(validation, seed, False), version, dropped)


def _row(row: Row, source: PreferenceSourceConfig, config: Config, renderer: Renderer) -> PairRow | None:
    raw, where = row.values, row.where
    for name in ("chosen_field", "rejected_field"):
        need_column(row, getattr(source, name), f"data.preferences.{name}")
    chosen = _conversation(raw, source.chosen_field, where)
    rejected = _conversation(raw, source.rejected_field, where)
    prompt = _prompt(raw, source, chosen, rejected, where)
    answers = {source.chosen_field: chosen[-1]["content"], source.rejected_field: rejected[-1]["content"]}
    if len(set(answers.values())) == 1:
        raise InvalidData("data_pair", f"{where}: {' and '.join(answers)} are the same, expected two different answers")
    refuse_surrogates(str(raw["id"]), f"{where}: id")
    prompt_ids = renderer.prompt(prompt)
    token_ids = {name: renderer.answer(prompt, text) for name, text in answers.items()}
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
    for message in messages:
        refuse_surrogates(message["content"], f"{where}: {field}")
    return list(messages)


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
