import asyncio

import pytest

from services.common.config import RedisConfig, ServerConfig
from services.common.errors import Outage, Unreachable
from services.common.transport.client import connect
from services.common.transport.outages import Outages
from services.common.transport.rollout_registry import RolloutRegistry
from services.rollout.weights import registration as module
from services.rollout.weights.registration import Registration, reachable_address
from tests.support.rollout.fakes import FakeEngine


@pytest.fixture
def registry(redis_client):
    return RolloutRegistry(redis_client, "registration")


async def until(condition):
    async with asyncio.timeout(10):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_rollout_is_there_while_its_engine_is_and_leaves_when_it_goes(registry, monkeypatch):
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.01)
    engine = FakeEngine()
    engine.problem = "engine is starting"
    registration = Registration(registry, engine, rollout_id="r1", address="here:1", outages=Outages(10))
    removed, remove = asyncio.Event(), registry.remove

    def counted(rollout_id):
        remove(rollout_id)
        loop.call_soon_threadsafe(removed.set)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(registry, "remove", counted)
    task = asyncio.create_task(registration.run())
    await asyncio.wait_for(removed.wait(), 10)
    assert registry.alive() == []
    engine.problem = None
    await until(lambda: [entry.engine for entry in registry.alive()] == ["first"])
    engine.problem, engine.identity = "engine restarts", "second"
    await until(lambda: registry.alive() == [])
    engine.problem = None
    await until(lambda: [entry.engine for entry in registry.alive()] == ["second"])
    (entry,) = registry.alive()
    assert (entry.rollout_id, entry.address, list(entry.devices)) == ("r1", "here:1", [""])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert registry.alive() == []


async def test_an_outage_does_not_end_it_though_the_engine_is_away(monkeypatch):
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.01)
    calls = []
    failures = [Unreachable("redis_unreachable", "connection refused"), Outage("redis_loading", "LOADING")]

    class Registry:
        def remove(self, rollout_id):
            if failures:
                raise failures.pop()
            calls.append(f"{rollout_id} removed")

    engine, outages = FakeEngine(), Outages(10, (Outage, Unreachable))
    engine.problem = "engine restarts"
    task = asyncio.create_task(Registration(Registry(), engine, rollout_id="r1", address="a", outages=outages).run())
    await until(lambda: calls and outages.problem is None)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("host", "address"),
    [("10.1.2.3", "10.1.2.3:7"), ("localhost", "localhost:7"), ("::1", "[::1]:7"), ("0.0.0.0", "127.0.0.1:7")],
)
def test_the_address_is_the_one_that_others_reach(redis_client, host, address):
    """Redis is on the loopback here: that is how this machine is known where it runs."""
    redis_client.ping()
    assert reachable_address(ServerConfig(host=host), 7, redis_client) == address
    assert redis_client.ping()


def test_without_redis_there_is_no_address_yet():
    client = connect(RedisConfig(url="redis://127.0.0.1:1/0", retry_seconds=0.5))
    with pytest.raises(Unreachable):
        reachable_address(ServerConfig(host="0.0.0.0"), 7, client)
