"""Rows of any source, and the location of each."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

from services.common.config import PreferenceSourceConfig, SourceConfig
from services.common.errors import InvalidData, Unavailable

# The prompt, or all other columns together: the reward service refuses more.
MAX_TEXT_BYTES = 4 * 2**20

AnySource = SourceConfig | PreferenceSourceConfig


@dataclass(frozen=True)
class Row:
    """`where` names it to people: its file and line, or its source and number, counted from 0. `values` has an "id"."""

    where: str
    values: dict[str, Any]


def read_rows(source: AnySource, key: str, most: int | None = None) -> Iterator[Row]:
    """As many as `source.size` and `most` allow. `key` is the source's section, such as data.train.

    Raises InvalidData that names the key, the value and the row, and Unavailable where the hub does not answer.
    """
    sizes = [size for size in (source.size, most) if size is not None]
    rows = _read(source, key)
    for index, (where, values) in enumerate(islice(rows, min(sizes)) if sizes else rows):
        yield Row(where, {"id": values.get("id", index), **values})


def metadata(row: Row, prompt_field: str) -> tuple[str, frozenset[str]]:
    """All other columns as JSON for the scorer, and the names of those that JSON cannot hold.

    Dates become ISO text, and numbers that are not finite null, as missing ones: not every column is for a scorer.
    """
    columns = {name: value for name, value in row.values.items() if name != prompt_field}
    try:
        return json.dumps(columns, sort_keys=True, allow_nan=False), frozenset()
    except (TypeError, ValueError):
        pass
    kept, left_out = {}, set()
    for name, value in columns.items():
        try:
            kept[name] = _portable(value)
        except TypeError:
            left_out.add(name)
    return json.dumps(kept, sort_keys=True, allow_nan=False), frozenset(left_out)


def need_column(row: Row, name: str, key: str) -> Any:
    """The value of column `name`, which the configuration names by `key`. Raises InvalidData ("data_column")."""
    if name not in row.values:
        raise InvalidData(
            "data_column", f"{row.where}: there is no column {name!r} ({key}), only {', '.join(row.values)}"
        )
    return row.values[name]


def refuse_surrogates(text: str, field: str) -> None:
    """Raises InvalidData for half of a surrogate pair, as JSON can name it: no tokenizer takes it, nor does UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidData(
            "data_text",
            f"{field} holds {text[error.start]!a} at character {error.start}, half of a surrogate pair: "
            "expected text that UTF-8 can hold",
        ) from error


def _portable(value: Any) -> Any:
    """Raises TypeError for what JSON cannot hold."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, dict):
        return {str(name): _portable(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(part) for part in value]
    raise TypeError(f"{type(value).__name__} is not JSON")


def _read(source: AnySource, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if source.kind == "jsonl":
        return _read_jsonl(source, key)
    if source.kind == "hf":
        return _read_hf(source, key)
    assert isinstance(source, SourceConfig)
    return _read_reasoning_gym(source, key)


def _read_jsonl(source: AnySource, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    path = Path(source.path)
    if not path.is_file():
        raise InvalidData("data_missing", f"{key}.path is {source.path!r}, expected a file: it does not exist")
    try:
        lines = path.open("rb")
    except OSError as error:
        raise InvalidData("data_missing", f"{key}.path is {source.path!r}, which cannot be read ({error})") from error
    with lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{path} line {number}"
                yield where, _parse(line, f"{key}.path: {where}", "utf-8-sig" if number == 1 else "utf-8")


def _parse(line: bytes, where: str, encoding: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode(encoding))
    except UnicodeDecodeError as error:
        raise InvalidData(
            "data_encoding", f"{where} is not UTF-8 (byte 0x{line[error.start]:02x} at position {error.start})"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidData("data_json", f"{where} is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise InvalidData("data_json", f"{where} is {type(row).__name__}, expected an object")
    return row


def _read_hf(source: AnySource, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets

    saved = any((Path(source.path) / name).is_file() for name in ("dataset_dict.json", "dataset_info.json"))
    try:
        if saved:
            dataset = datasets.load_from_disk(source.path)
            if isinstance(dataset, datasets.DatasetDict):
                if source.split not in dataset:
                    raise InvalidData(
                        "data_split",
                        f"{key}.split is {source.split!r}, expected a split of {source.path}: {', '.join(dataset)}",
                    )
                dataset = dataset[source.split]
        else:
            dataset = datasets.load_dataset(source.path, split=source.split, **source.options)
    except ConnectionError as error:
        raise Unavailable(
            "data_unavailable", f"{key}.path is {source.path!r}, which cannot be reached ({error})"
        ) from error
    except (OSError, ValueError, TypeError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise InvalidData(
            "data_missing",
            f"{key}.path is {source.path!r} (split {source.split!r}, options {source.options}): datasets cannot load "
            f"it ({type(error).__name__}: {error})",
        ) from error
    for number, row in enumerate(dataset):
        yield f"{source.path} row {number}", dict(row)


def _read_reasoning_gym(source: SourceConfig, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if source.path not in DATASETS:
        raise InvalidData("data_missing", f"{key}.path is {source.path!r}, expected a task of reasoning-gym")
    try:
        dataset = reasoning_gym.create_dataset(source.path, size=source.size, **source.options)
    except (AssertionError, ValueError, TypeError) as error:
        raise InvalidData(
            "data_options", f"{key}.options are {source.options}: {source.path} does not take them ({error})"
        ) from error
    for number, row in enumerate(dataset):
        # The scorer asks the task itself, which wants its own fields back unchanged.
        columns = {source.prompt_field: row["question"], "answer": row["answer"], "metadata": row["metadata"]}
        yield f"{source.path} row {number}", columns
