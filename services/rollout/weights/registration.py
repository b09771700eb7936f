"""Registers this rollout and its address in the run's Redis while it is alive."""

import asyncio
from contextlib import suppress
from functools import partial

import redis
from trivet.v1 import rollout_pb2

from services.common.config import ServerConfig
from services.common.config.addresses import EVERY_ADDRESS, host_and_port
from services.common.errors import Unavailable
from services.common.transport.client import local_address
from services.common.transport.outages import Outages
from services.common.transport.rollout_registry import BEAT_SECONDS, RolloutRegistry
from services.rollout.engine.protocol import Engine

REMOVE_SECONDS = 1.0


class Registration:
    """Registered while the engine can be called; what is not renewed expires."""

    def __init__(
        self,
        registry: RolloutRegistry,
        engine: Engine,
        *,
        rollout_id: str,
        address: str,
        outages: Outages,
    ) -> None:
        self._registry, self._engine, self._outages = registry, engine, outages
        self._id, self._address = rollout_id, address

    async def run(self) -> None:
        """Renews the registration until cancelled, then removes it. Raises Unavailable if Redis does not come back."""
        try:
            while True:
                await self._outages.ride_out(partial(asyncio.to_thread, self._beat))
                await asyncio.sleep(BEAT_SECONDS)
        finally:
            # Where Redis does not answer, it expires.
            with suppress(Unavailable, TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(self._registry.remove, self._id), REMOVE_SECONDS)

    def entry(self) -> rollout_pb2.RegisteredRollout:
        return rollout_pb2.RegisteredRollout(
            rollout_id=self._id, address=self._address, engine=self._engine.identity, devices=self._engine.devices
        )

    def _beat(self) -> None:
        if self._engine.problem is None:
            self._registry.renew(self.entry())
        else:
            self._registry.remove(self._id)


def reachable_address(server: ServerConfig, grpc_port: int, client: redis.Redis) -> str:
    """host:port of this rollout for the trainer: its own host, or the address from which this machine reaches Redis."""
    host = server.host
    if host in EVERY_ADDRESS:
        host = local_address(client)
    return host_and_port(host, grpc_port)
