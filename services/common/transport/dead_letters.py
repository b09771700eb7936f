"""Entries given up: each with its code and reason, for the trainer to count and for people to inspect."""

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

import redis
from google.protobuf.message import DecodeError, Message
from trivet.v1 import sample_pb2

from services.common import metrics
from services.common.errors import InvalidData, Outage, TrivetError

M = TypeVar("M", bound=Message)

FIELD = b"message"
# The newest letters stay, with a part of each entry and reason: what is given up must not fill Redis.
DEAD_LETTERS_KEPT = 1_000
PAYLOAD_BYTES_KEPT = 2**20
REASON_CHARACTERS_KEPT = 2_000
_STREAM_ID = re.compile(rb"\d{1,20}-\d{1,20}")


def dead_letter(
    stream: str,
    entry_id: str,
    payload: bytes,
    error: TrivetError,
    *,
    group_id: str = "",
    attempt: int = 0,
    deliveries: int = 1,
) -> sample_pb2.DeadLetter:
    reason = str(error)
    if len(reason) > REASON_CHARACTERS_KEPT:
        reason = f"{reason[:REASON_CHARACTERS_KEPT]}… ({len(reason)} characters)"
    if len(payload) > PAYLOAD_BYTES_KEPT:
        reason += f" [payload truncated: the first {PAYLOAD_BYTES_KEPT} of {len(payload)} bytes]"
    return sample_pb2.DeadLetter(
        stream=stream,
        entry_id=entry_id,
        group_id=group_id,
        attempt=attempt,
        code=error.code,
        # A reason may quote what is not UTF-8.
        reason=reason.encode("utf-8", "backslashreplace").decode(),
        deliveries=deliveries,
        payload=payload[:PAYLOAD_BYTES_KEPT],
    )


class DeadLetters:
    """The dead letters of a run: the trainer reads each at least once, and the newest stay for people to inspect."""

    def __init__(self, client: redis.Redis, run: str) -> None:
        self.client, self.name, self._read_key = client, f"{run}:dead", f"{run}:dead:read"
        self._newest: bytes | None = None

    def add(self, letter: sample_pb2.DeadLetter, finish: Callable[[Any], None] | None = None) -> None:
        """With what `finish` does to the entry, in one transaction."""
        with self.client.pipeline(transaction=True) as pipe:
            pipe.xadd(self.name, {FIELD: letter.SerializeToString()})
            if finish is not None:
                finish(pipe)
            pipe.execute()
        metrics.DEAD_LETTERS.labels(letter.stream, letter.code).inc()

    def report(self, letter: sample_pb2.DeadLetter) -> None:
        """Of what was already removed. A Redis that takes nothing more gets no letter: the log has the reason."""
        with suppress(Outage):
            self.add(letter)

    def read(self) -> list[sample_pb2.DeadLetter]:
        """Those added since the last `mark_read`, in order; repeated until marked.

        An entry that is no letter comes as a letter about itself.
        """
        mark = cast(bytes | None, self.client.get(self._read_key))
        # What somebody else wrote there is no mark: reading letters again does no harm.
        start = f"({mark.decode()}" if mark is not None and _STREAM_ID.fullmatch(mark) else "-"
        rows = cast(list[Any], self.client.xrange(self.name, min=start, count=256))
        self._newest = rows[-1][0] if rows else None
        return [_parse(entry_id.decode(), fields) for entry_id, fields in rows]

    def mark_read(self) -> None:
        """Nothing unread is trimmed: only what lies before the mark is."""
        if self._newest is None:
            return
        self.client.set(self._read_key, self._newest)
        if self.client.xlen(self.name) > 2 * DEAD_LETTERS_KEPT:
            newest = cast(list[Any], self.client.xrevrange(self.name, max=self._newest, count=DEAD_LETTERS_KEPT))
            self.client.xtrim(self.name, minid=newest[-1][0], approximate=False)


def parse_entry(fields: dict[bytes, bytes], message_type: type[M]) -> M:
    """The message of a stream's entry. Raises InvalidData("entry_unparsable")."""
    payload, expected = fields.get(FIELD), message_type.DESCRIPTOR.name
    if payload is None:
        raise InvalidData(
            "entry_unparsable", f"entry has fields {sorted(fields)}, expected {FIELD!r} with a {expected}"
        )
    try:
        return message_type.FromString(payload)
    except DecodeError as error:
        raise InvalidData("entry_unparsable", f"entry is not a {expected} ({error})") from error


def _parse(entry_id: str, fields: dict[bytes, bytes]) -> sample_pb2.DeadLetter:
    try:
        return parse_entry(fields, sample_pb2.DeadLetter)
    except InvalidData as error:
        metrics.DEAD_LETTERS.labels("dead", error.code).inc()
        return dead_letter("dead", entry_id, fields.get(FIELD, b""), error)
