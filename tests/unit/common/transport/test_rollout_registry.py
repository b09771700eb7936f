from trivet.v1 import rollout_pb2

from services.common.transport import rollout_registry
from services.common.transport.rollout_registry import RolloutRegistry


def entry(name, engine="1"):
    return rollout_pb2.RegisteredRollout(rollout_id=name, address=f"{name}:50051", engine=engine, devices=["GPU-1"])


def test_who_renews_is_alive(redis_client):
    registry = RolloutRegistry(redis_client, "run")
    assert registry.alive() == []
    for name in ("b", "a"):
        registry.renew(entry(name))
    assert registry.alive() == [entry("a"), entry("b")]
    registry.renew(entry("a", engine="2"))
    assert registry.alive()[0].engine == "2"
    registry.remove("a")
    assert registry.alive() == [entry("b")]


def test_runs_are_kept_apart(redis_client):
    RolloutRegistry(redis_client, "one").renew(entry("a"))
    assert RolloutRegistry(redis_client, "other").alive() == []


def test_who_does_not_renew_is_forgotten(redis_client, monkeypatch):
    monkeypatch.setattr(rollout_registry, "TTL_SECONDS", 1)
    registry = RolloutRegistry(redis_client, "run")
    registry.renew(entry("a"))
    assert 0 < redis_client.pttl("run:rollouts:a") <= 1000
    # As its time's end does.
    redis_client.delete("run:rollouts:a")
    assert registry.alive() == []
    assert redis_client.smembers("run:rollouts") == set()
    # A beat that was late brings it back.
    registry.renew(entry("a"))
    assert registry.alive() == [entry("a")]
