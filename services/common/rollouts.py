"""Which rollouts of a run are alive, so that the trainer can call them."""

from typing import cast

import redis
from trivet.v1 import rollout_pb2

BEAT_SECONDS = 3.0
# An entry outlives a few late beats.
TTL_SECONDS = 15


class RolloutRegistry:
    """{run}:rollouts names them; each one's own key expires unless it is renewed."""

    def __init__(self, client: redis.Redis, run: str) -> None:
        self._client, self._name = client, f"{run}:rollouts"

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
        """By id. Forgets those whose time is up."""
        ids = sorted(name.decode() for name in cast(set[bytes], self._client.smembers(self._name)))
        found = []
        for rollout_id in ids:
            entry = cast(bytes | None, self._client.get(self._key(rollout_id)))
            if entry is None:
                self._client.srem(self._name, rollout_id)
            else:
                found.append(rollout_pb2.RegisteredRollout.FromString(entry))
        return found

    def _key(self, rollout_id: str) -> str:
        return f"{self._name}:{rollout_id}"
