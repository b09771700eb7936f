from prometheus_client import CollectorRegistry
from trivet.v1 import sample_pb2

from services.common.config import RedisConfig
from services.common.errors import InvalidData
from services.common.transport.redis_metrics import RedisCollector
from services.common.transport.streams import RunStreams


def registry_of(config: RedisConfig) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(RedisCollector(config, "run"))
    return registry


def test_a_run_that_has_not_begun_has_empty_queues(redis_client, redis_config):
    values = registry_of(redis_config).get_sample_value
    assert values("trivet_redis_up") == 1
    assert values("trivet_run_dead_letters_total") == 0
    for stream in ("prompts", "samples", "scored"):
        assert values("trivet_stream_entries", {"stream": stream, "state": "waiting"}) == 0
        assert values("trivet_stream_oldest_seconds", {"stream": stream}) == 0


def test_what_waits_and_what_is_taken_are_told_apart(redis_client, redis_config):
    prompts = RunStreams(redis_client, "run", redis_config).prompts("a")
    old = f"{int(redis_client.time()[0]) * 1000 - 90_000}-0"
    redis_client.xadd("run:prompts", {"message": sample_pb2.Prompt(group_id="g").SerializeToString()}, id=old)
    values = registry_of(redis_config).get_sample_value
    assert values("trivet_stream_entries", {"stream": "prompts", "state": "waiting"}) == 1
    assert 89 < values("trivet_stream_oldest_seconds", {"stream": "prompts"}) < 120

    (entry,) = prompts.read(1, 1.0)
    prompts.add_all([sample_pb2.Prompt(group_id="h"), sample_pb2.Prompt(group_id="i")])
    assert values("trivet_stream_entries", {"stream": "prompts", "state": "taken"}) == 1
    assert values("trivet_stream_entries", {"stream": "prompts", "state": "waiting"}) == 2
    # What is taken waits no longer.
    assert values("trivet_stream_oldest_seconds", {"stream": "prompts"}) < 60

    prompts.ack([entry.id])
    assert values("trivet_stream_entries", {"stream": "prompts", "state": "taken"}) == 0


def test_dead_letters_are_counted_over_what_was_read_of_them(redis_client, redis_config):
    prompts = RunStreams(redis_client, "run", redis_config).prompts("a")
    prompts.add_all([sample_pb2.Prompt(group_id="g"), sample_pb2.Prompt(group_id="h")])
    for entry in prompts.read(2, 1.0):
        prompts.dead_letter(entry, InvalidData("prompt_empty", "it is empty"))
    redis_client.xtrim("run:dead", maxlen=0)
    assert registry_of(redis_config).get_sample_value("trivet_run_dead_letters_total") == 2


def test_memory_is_reported_with_its_limit(redis_client, redis_config):
    values = registry_of(redis_config).get_sample_value
    used = values("trivet_redis_memory_used_bytes")
    assert 0 < used < values("trivet_redis_memory_limit_bytes")
    redis_client.config_set("maxmemory", 123_456_789)
    try:
        assert values("trivet_redis_memory_limit_bytes") == 123_456_789
    finally:
        redis_client.config_set("maxmemory", 0)


def test_a_redis_that_does_not_answer_is_down_and_nothing_else_is_claimed():
    values = registry_of(RedisConfig(url="redis://127.0.0.1:1/0")).get_sample_value
    assert values("trivet_redis_up") == 0
    assert values("trivet_redis_memory_used_bytes") is None
    assert values("trivet_stream_entries", {"stream": "prompts", "state": "waiting"}) is None
