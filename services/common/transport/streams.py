"""Typed messages on Redis Streams: delivered at least once, claimed from the dead, given up with a reason."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import redis
from google.protobuf.message import Message
from redis.exceptions import ResponseError
from trivet.v1 import sample_pb2

from services.common import metrics
from services.common.config import RedisConfig
from services.common.errors import InvalidData, TrivetError, Unavailable
from services.common.transport.client import MAX_BLOCK_SECONDS
from services.common.transport.dead_letters import FIELD, DeadLetters, dead_letter, parse_entry

M = TypeVar("M", bound=Message)
N = TypeVar("N", bound=Message)

# A call that takes longer, blocking aside, has met an outage.
SLOW_SECONDS = 0.5


@dataclass(frozen=True)
class Entry(Generic[M]):
    id: str
    message: M
    # 1 when it is read for the first time.
    deliveries: int


class Stream(Generic[M]):
    """One stream as one consumer of one group sees it. Thread-safe."""

    def __init__(
        self,
        client: redis.Redis,
        name: str,
        message_type: type[M],
        *,
        group: str,
        consumer: str,
        config: RedisConfig,
        dead_letters: DeadLetters,
        claims: bool = True,
    ) -> None:
        self.client, self.name, self.message_type = client, name, message_type
        self.group, self.consumer, self.config = group, consumer, config
        self._dead_letters, self._claims = dead_letters, claims
        self._claim_cursor = "0-0"
        self._next_claim = 0.0
        self.label = name.rpartition(":")[2]
        self._ensure_group()

    def add(self, message: M) -> str:
        return cast(bytes, self.client.xadd(self.name, {FIELD: message.SerializeToString()})).decode()

    def add_all(self, messages: Sequence[M]) -> None:
        with self.client.pipeline(transaction=True) as pipe:
            for message in messages:
                pipe.xadd(self.name, {FIELD: message.SerializeToString()})
            pipe.execute()

    def read(self, count: int, block_seconds: float) -> list[Entry[M]]:
        """Up to `count` entries, those whose consumer stopped first. Empty after `block_seconds` without any.

        Entries that cannot be parsed, or were delivered too often, go to the dead letters and are not returned.
        """
        claimed = self._claim(count) if self._claims else []
        if claimed or count < 1:
            return claimed
        block = max(1, round(min(block_seconds, MAX_BLOCK_SECONDS) * 1000))
        return self._parse(self._read_group(count, block), {})

    def recover(self) -> Iterator[Entry[M]]:
        """What this consumer had read before it stopped and never acknowledged, oldest first.

        One at a time: only an entry that is in hand when the process dies has one more delivery for it. The count is
        set, not raised, so that a call which the client repeats over an outage counts once.
        """
        last = "-"
        while found := self._pending(last, "+", self.consumer):
            raw_id, count = found["message_id"], found["times_delivered"] + 1
            last = f"({raw_id.decode()}"
            rows = cast(list[Any], self.client.xrange(self.name, min=raw_id, max=raw_id))
            if not rows:
                # A deleted entry stays pending.
                self.ack([raw_id.decode()])
                continue
            self._hold([raw_id.decode()], retrycount=count)
            for entry in self._parse(rows, {raw_id: count}):
                yield entry
                self.settle([entry.id])

    def release(self, entries: Iterable[Entry[M]]) -> None:
        """Hands the entries back: others may claim them at once, and this delivery does not count."""
        for entry in entries:
            self._hold(
                [entry.id], retrycount=entry.deliveries - 1, idle=math.ceil(self.config.claim_idle_seconds * 1000)
            )

    def settle(self, ids: Iterable[str]) -> None:
        """The entries did no harm: this delivery does not count. For a consumer that keeps what it reads."""
        self._hold(ids, retrycount=0)

    def touch(self, ids: Iterable[str]) -> None:
        """Marks the entries as still in progress, so that nobody claims them."""
        self._hold(ids)

    def ack(self, ids: Iterable[str]) -> None:
        """Acknowledges and deletes, in one transaction."""
        listed = list(ids)
        if listed:
            with self.client.pipeline(transaction=True) as pipe:
                self._finish(pipe, listed)
                pipe.execute()

    def forward(self, entry_id: str, target: "Stream[N]", message: N) -> None:
        """Adds `message` to `target` and finishes the entry here at once: it is always in one of the two."""
        with self.client.pipeline(transaction=True) as pipe:
            pipe.xadd(target.name, {FIELD: message.SerializeToString()})
            self._finish(pipe, [entry_id])
            pipe.execute()

    def dead_letter(self, entry: Entry[M], error: TrivetError) -> None:
        self._dead_letter(
            entry.id, entry.message.SerializeToString(), prompt_of(entry.message), entry.deliveries, error
        )

    def scan(self) -> Iterable[M]:
        """Every parsable message in the stream, read or not, without taking any."""
        last = "-"
        while rows := cast(list[Any], self.client.xrange(self.name, min=last, count=256)):
            for _, fields in rows:
                # What cannot be parsed is dead-lettered by the consumer that reads it.
                with suppress(InvalidData):
                    yield parse_entry(fields, self.message_type)
            last = f"({rows[-1][0].decode()}"

    def depth(self) -> int:
        return self.client.xlen(self.name)

    def pending(self) -> int:
        summary: Any = {"pending": 0}
        with self._calling():
            summary = self.client.xpending(self.name, self.group)
        return int(summary["pending"])

    def _hold(self, ids: Iterable[str], **options: Any) -> None:
        listed: list[Any] = list(ids)
        if listed:
            with self._calling():
                self.client.xclaim(self.name, self.group, self.consumer, 0, listed, justid=True, **options)

    def _ensure_group(self) -> None:
        try:
            self.client.xgroup_create(self.name, self.group, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    def _read_group(self, count: int, block: int) -> list[Any]:
        reply: Any = None
        with self._calling(block / 1000):
            reply = self.client.xreadgroup(self.group, self.consumer, {self.name: ">"}, count=count, block=block)
        if not reply:
            return []
        streams = reply.values() if isinstance(reply, dict) else [rows for _, rows in cast(list[Any], reply)]
        return [row for rows in streams for row in rows]

    @contextmanager
    def _calling(self, block_seconds: float = 0.0) -> Iterator[None]:
        """Recreates a group that Redis lost (flushed, restarted empty); the operation then found an empty stream.

        After an outage nothing is claimed before everybody has had the time to touch what it holds.
        """
        idle = self.config.claim_idle_seconds
        outage_at = time.monotonic() + block_seconds + max(SLOW_SECONDS, idle / 2)
        try:
            yield
        except Unavailable:
            outage_at = 0.0
            raise
        except ResponseError as error:
            # A pipeline puts its own words before it.
            if "NOGROUP" not in str(error):
                raise
            metrics.STREAM_REBUILDS.labels(self.label).inc()
            self._ensure_group()
        finally:
            if time.monotonic() > outage_at:
                self._next_claim = time.monotonic() + idle

    def _claim(self, count: int) -> list[Entry[M]]:
        if count < 1 or time.monotonic() < self._next_claim:
            return []
        idle = round(self.config.claim_idle_seconds * 1000)
        cursor, rows = b"0-0", []
        with self._calling():
            cursor, rows, *_ = self.client.xautoclaim(
                self.name, self.group, self.consumer, idle, self._claim_cursor, count=count
            )
        deliveries = {row[0]: found["times_delivered"] for row in rows if (found := self._pending(row[0], row[0]))}
        if time.monotonic() < self._next_claim:
            # The claim itself waited for Redis: those it was meant for could not touch the entries.
            for raw_id, counted in deliveries.items():
                self._hold([raw_id.decode()], retrycount=counted - 1)
            return []
        self._claim_cursor = cursor.decode()
        if self._claim_cursor == "0-0":
            self._next_claim = time.monotonic() + self.config.claim_idle_seconds / 4
        metrics.STREAM_CLAIMS.labels(self.label).inc(len(rows))
        return self._parse(rows, deliveries)

    def _pending(self, start: Any, end: Any, consumer: str | None = None) -> dict[str, Any] | None:
        """The first pending entry from `start` to `end`."""
        found: Any = []
        with self._calling():
            found = self.client.xpending_range(self.name, self.group, start, end, 1, consumername=consumer)
        return found[0] if found else None

    def _parse(self, rows: list[Any], deliveries: dict[bytes, int]) -> list[Entry[M]]:
        entries = []
        for raw_id, fields in rows:
            count = deliveries.get(raw_id, 1)
            try:
                message = parse_entry(fields, self.message_type)
            except InvalidData as error:
                self._dead_letter(raw_id.decode(), fields.get(FIELD, b""), sample_pb2.Prompt(), count, error)
                continue
            entry = Entry(raw_id.decode(), message, count)
            if count > self.config.max_deliveries:
                reason = f"delivered {count} times without success, at most {self.config.max_deliveries} allowed"
                self.dead_letter(entry, TrivetError("too_many_deliveries", reason))
                continue
            entries.append(entry)
        return entries

    def _dead_letter(
        self, entry_id: str, payload: bytes, prompt: sample_pb2.Prompt, deliveries: int, error: TrivetError
    ) -> None:
        letter = dead_letter(
            self.label,
            entry_id,
            payload,
            error,
            group_id=prompt.group_id,
            attempt=prompt.attempt,
            deliveries=deliveries,
        )
        self._dead_letters.add(letter, lambda pipe: self._finish(pipe, [entry_id]))

    def _finish(self, pipe: Any, ids: list[str]) -> None:
        pipe.xack(self.name, self.group, *ids)
        pipe.xdel(self.name, *ids)


def prompt_of(message: Message) -> sample_pb2.Prompt:
    if isinstance(message, sample_pb2.ScoredGroup):
        return message.group.prompt
    if isinstance(message, sample_pb2.Group):
        return message.prompt
    return message if isinstance(message, sample_pb2.Prompt) else sample_pb2.Prompt()


class RunStreams:
    """The streams of one run. The trainer neither claims nor is claimed from: its entries wait for a checkpoint."""

    def __init__(self, client: redis.Redis, run: str, config: RedisConfig) -> None:
        self._client, self._run, self._config = client, run, config

    def prompts(self, consumer: str) -> Stream[sample_pb2.Prompt]:
        return self._stream("prompts", sample_pb2.Prompt, "rollout", consumer)

    def samples(self, consumer: str) -> Stream[sample_pb2.Group]:
        return self._stream("samples", sample_pb2.Group, "reward", consumer)

    def scored(self, consumer: str) -> Stream[sample_pb2.ScoredGroup]:
        return self._stream("scored", sample_pb2.ScoredGroup, "trainer", consumer, claims=False)

    def _stream(self, name: str, message_type: type[M], group: str, consumer: str, claims: bool = True) -> Stream[M]:
        return Stream(
            self._client,
            f"{self._run}:{name}",
            message_type,
            group=group,
            consumer=consumer,
            config=self._config,
            dead_letters=DeadLetters(self._client, self._run),
            claims=claims,
        )
