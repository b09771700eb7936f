"""A group is checked before anything is computed from it."""

import json
from typing import NoReturn

from trivet.v1 import sample_pb2

from services.common.data.rows import MAX_TEXT_BYTES
from services.common.errors import InvalidData
from services.common.wire.samples import check_logprobs


def check_group(group: sample_pb2.Group) -> None:
    """Raises InvalidData that names the field, its value and what was expected."""
    prompt = group.prompt
    if not prompt.group_id:
        raise InvalidData("group_id_missing", "group.prompt.group_id is empty, expected the id of the request")
    where = f"group {prompt.group_id}"
    if not group.samples:
        raise InvalidData("group_size", f"{where}: samples is empty, expected {prompt.group_size or 'at least 1'}")
    if prompt.group_size and len(group.samples) != prompt.group_size:
        raise InvalidData(
            "group_size", f"{where}: samples holds {len(group.samples)}, expected group_size ({prompt.group_size})"
        )
    _check_size(prompt.text, f"{where}: prompt.text")
    _check_metadata(prompt.metadata_json, where)
    indices: set[int] = set()
    ids: set[str] = set()
    for position, sample in enumerate(group.samples):
        field = f"{where}: samples[{position}]"
        if sample.index in indices:
            raise InvalidData("sample_index", f"{field}.index is {sample.index}, which came before")
        if not sample.sample_id or sample.sample_id in ids:
            raise InvalidData("sample_id", f"{field}.sample_id is {sample.sample_id!r}, expected one of its own")
        indices.add(sample.index)
        ids.add(sample.sample_id)
        _check_sample(sample, field)


def _check_sample(sample: sample_pb2.Sample, field: str) -> None:
    _check_size(sample.text, f"{field}.text")
    check_logprobs(sample, field)


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
