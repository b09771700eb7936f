"""Which rollouts of a run are alive, so that the trainer can call them."""

from typing import cast

import redis
from trivet.v1 import rollout_pb2

from services.common.errors import InvalidData
from services.common.logs import get_logger
from services.common.transport.dead_letters import FIELD, DeadLetters, dead_letter, parse_entry

BEAT_SECONDS = 3.0
# An entry outlives a few late beats.
TTL_SECONDS = 15

log = get_logger(__name__)


class RolloutRegistry:
    """{run}:rollouts names them; each one's own key expires unless it is renewed."""

    def __init__(self, client: redis.Redis, run: str) -> None:
        self._client, self._name = client, f"{run}:rollouts"
        self._dead_letters = DeadLetters(client, run)

    def renew(self, rollout: rollout_pb2.RegisteredRollout) -> None:
        """To be called every BEAT_SECONDS."""
        with self._client.pipeline(transaction=True) as pipe:
            pipe.set(self._key(rollout.rollout_id), rollout.SerializeToString(), ex=TTL_SECONDS)
            pipe.sadd(self._name, rollout.rollout_id)
            pipe.execute()

    def remove(self, rollout_id: str) -> None:
        with self._client.pipeline(transaction=True) as pipe:
            pipe.srem(self._name, rollout_id)
            pipe.delete(self._key(rollout_id))
            pipe.execute()

    def alive(self) -> list[rollout_pb2.RegisteredRollout]:
        """By id. Forgets those whose time is up, and what is no registration."""
        found = []
        for name in sorted(cast(set[bytes], self._client.smembers(self._name))):
            key = self._name.encode() + b":" + name
            entry = cast(bytes | None, self._client.get(key))
            try:
                if entry is not None:
                    found.append(_parse(name, entry))
                    continue
            except InvalidData as error:
                log.warning("registration dropped", rollout=repr(name), code=error.code, reason=str(error))
                self._dead_letters.report(dead_letter("rollouts", repr(name), entry or b"", error))
                self._client.delete(key)
            self._client.srem(self._name, name)
        return found

    def _key(self, rollout_id: str) -> str:
        return f"{self._name}:{rollout_id}"


def _parse(name: bytes, entry: bytes) -> rollout_pb2.RegisteredRollout:
    rollout = parse_entry({FIELD: entry}, rollout_pb2.RegisteredRollout)
    if rollout.rollout_id.encode() != name or not rollout.address:
        raise InvalidData(
            "registration", f"{name!r} is registered as {rollout.rollout_id!r} at {rollout.address!r}, expected itself"
        )
    return rollout
