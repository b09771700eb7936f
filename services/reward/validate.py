"""Texts and metadata are checked before a scorer sees them."""

import json
from typing import NoReturn

from trivet.v1 import sample_pb2

from services.common.data.rows import MAX_TEXT_BYTES
from services.common.errors import InvalidData


def check_texts(group: sample_pb2.Group) -> None:
    """What scorers are given. Raises InvalidData that names the field, its value and what was expected."""
    prompt = group.prompt
    where = f"group {prompt.group_id}"
    _check_size(prompt.text, f"{where}: prompt.text")
    _check_metadata(prompt.metadata_json, where)
    for sample in group.samples:
        _check_size(sample.text, f"text of sample {sample.sample_id}")


def _check_size(text: str, field: str) -> None:
    # A character takes one to four bytes: only a text near the limit has to be encoded to be measured.
    if 4 * len(text) > MAX_TEXT_BYTES and (size := len(text.encode())) > MAX_TEXT_BYTES:
        raise InvalidData("text_too_long", f"{field} has {size} bytes, at most {MAX_TEXT_BYTES} allowed")


def _check_metadata(text: str, where: str) -> None:
    field = f"{where}: prompt.metadata_json"
    _check_size(text, field)
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidData("metadata_invalid", f"{field} is {text[:80]!r}, expected a JSON object ({error})") from error
    if not isinstance(value, dict):
        raise InvalidData("metadata_invalid", f"{field} is {text[:80]!r}, expected a JSON object")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
