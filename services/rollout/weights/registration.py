"""Registers this rollout and its address in the run's Redis while it is alive."""

import asyncio
from functools import partial
from typing import Any

import redis
from trivet.v1 import rollout_pb2

from services.common.config import ServerConfig
from services.common.config.addresses import EVERY_ADDRESS, host_and_port
from services.common.transport.outages import Outages
from services.common.transport.rollout_registry import BEAT_SECONDS, RolloutRegistry
from services.rollout.engine.protocol import Engine

OUTAGE_SECONDS = 1800.0


class Registration:
    """Registered while the engine can be called; what is not renewed expires."""

    def __init__(
        self,
        registry: RolloutRegistry,
        engine: Engine,
        *,
        rollout_id: str,
        address: str,
        outages: Outages | None = None,
    ) -> None:
        self._registry, self._engine = registry, engine
        self._outages = outages or Outages(OUTAGE_SECONDS)
        self._id, self._address = rollout_id, address

    async def run(self) -> None:
        """Renews the registration until cancelled, then removes it. Raises Unavailable if Redis does not come back."""
        try:
            while True:
                if self._engine.problem is None:
                    entry = self.entry()
                    await self._outages.ride_out(partial(asyncio.to_thread, self._registry.renew, entry))
                else:
                    await asyncio.to_thread(self._registry.remove, self._id)
                await asyncio.sleep(BEAT_SECONDS)
        finally:
            await asyncio.to_thread(self._registry.remove, self._id)

    def entry(self) -> rollout_pb2.RegisteredRollout:
        return rollout_pb2.RegisteredRollout(
            rollout_id=self._id, address=self._address, engine=self._engine.identity, devices=self._engine.devices
        )


def reachable_address(server: ServerConfig, grpc_port: int, client: redis.Redis) -> str:
    """host:port of this rollout for the trainer: its own host, or the address from which this machine reaches Redis."""
    host = server.host
    if host in EVERY_ADDRESS:
        host = _own_host(client)
    return host_and_port(host, grpc_port)


def _own_host(client: redis.Redis) -> str:
    connection: Any = client.connection_pool.get_connection()
    try:
        name = connection._sock.getsockname()
    finally:
        client.connection_pool.release(connection)
    # A Unix socket's peer is on this machine.
    return str(name[0]) if isinstance(name, tuple) else "127.0.0.1"
