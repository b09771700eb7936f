"""A run's queues and the memory of its Redis, read from Redis at every scrape."""

import time
from collections.abc import Iterable
from typing import Any, cast

import redis
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from redis.backoff import NoBackoff
from redis.exceptions import ResponseError
from redis.retry import Retry

from services.common.config import RedisConfig
from services.common.logs import get_logger

# A scrape must not wait longer than Prometheus does.
TIMEOUT_SECONDS = 2.0
STREAMS = ("prompts", "samples", "scored")

log = get_logger(__name__)


class RedisCollector(Collector):
    """Rank 0 of the trainer has one, so that each queue of a run is one series."""

    def __init__(self, config: RedisConfig, run: str) -> None:
        assert config.url is not None
        self._run = run
        self._client = redis.Redis.from_url(
            config.url,
            socket_timeout=TIMEOUT_SECONDS,
            socket_connect_timeout=TIMEOUT_SECONDS,
            retry=Retry(NoBackoff(), 0),
        )

    def describe(self) -> Iterable[Metric]:
        return Families().all()

    def collect(self) -> Iterable[Metric]:
        families = Families()
        try:
            self._read(families)
        except redis.RedisError as error:
            log.warning("Redis not read", reason=f"{type(error).__name__}: {error}")
            families = Families()
        families.up.add_metric([], float(bool(families.entries.samples)))
        return families.all()

    def _read(self, families: "Families") -> None:
        with self._client.pipeline(transaction=False) as pipe:
            pipe.info("memory")
            pipe.xinfo_stream(f"{self._run}:dead")
            for stream in STREAMS:
                pipe.xlen(f"{self._run}:{stream}")
                pipe.xinfo_groups(f"{self._run}:{stream}")
            memory, dead, *streams = pipe.execute(raise_on_error=False)
        if isinstance(memory, Exception):
            raise memory
        families.memory_used.add_metric([], memory["used_memory"])
        if limit := memory.get("maxmemory") or memory.get("total_system_memory"):
            families.memory_limit.add_metric([], limit)
        # Before the first dead letter there is no such stream.
        families.dead_letters.add_metric([], 0 if isinstance(dead, ResponseError) else _value(dead)["entries-added"])
        for stream, length, groups in zip(STREAMS, streams[::2], streams[1::2], strict=True):
            group = {} if isinstance(groups, ResponseError) or not _value(groups) else groups[0]
            taken = group.get("pending", 0)
            families.entries.add_metric([stream, "waiting"], max(0, _value(length) - taken))
            families.entries.add_metric([stream, "taken"], taken)
            families.oldest.add_metric([stream], self._oldest_seconds(stream, group.get("last-delivered-id", b"0-0")))

    def _oldest_seconds(self, stream: str, last_taken: bytes) -> float:
        rows = cast(list[Any], self._client.xrange(f"{self._run}:{stream}", min=b"(" + last_taken, count=1))
        return max(0.0, time.time() - int(rows[0][0].partition(b"-")[0]) / 1000) if rows else 0.0


def _value(reply: Any) -> Any:
    if isinstance(reply, Exception):
        raise reply
    return reply


class Families:
    """One scrape's metrics."""

    def __init__(self) -> None:
        self.up = GaugeMetricFamily("trivet_redis_up", "1 when the run's Redis answered this scrape", labels=[])
        self.memory_used = GaugeMetricFamily("trivet_redis_memory_used_bytes", "Memory that Redis uses", labels=[])
        self.memory_limit = GaugeMetricFamily(
            "trivet_redis_memory_limit_bytes", "maxmemory of Redis, or without it the memory of its machine", labels=[]
        )
        self.dead_letters = CounterMetricFamily(
            "trivet_run_dead_letters", "Dead letters of the run, over restarts of its services", labels=[]
        )
        self.entries = GaugeMetricFamily(
            "trivet_stream_entries",
            "Entries of a stream: waiting for a consumer, or taken and not yet acknowledged",
            labels=["stream", "state"],
        )
        self.oldest = GaugeMetricFamily(
            "trivet_stream_oldest_seconds", "Age of the oldest entry that waits for a consumer", labels=["stream"]
        )

    def all(self) -> list[Metric]:
        return list(vars(self).values())
