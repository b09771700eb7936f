"""What the live view shows, read from the services and from Redis."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
import redis
from trivet.v1 import rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc

from services.cli.up.supervisor import Supervisor
from services.common.config import Config, ServerConfig
from services.common.config.addresses import from_this_machine, host_and_port

TIMEOUT_SECONDS = 1.0
REFRESH_SECONDS = 0.5
STREAMS = ("prompts", "samples", "scored")


@dataclass(frozen=True)
class Observation:
    """Services that do not answer, because they are starting or restarting, are missing."""

    trainer: trainer_pb2.TrainerServiceGetStatusResponse | None = None
    rollouts: dict[str, rollout_pb2.RolloutServiceGetStatusResponse] = field(default_factory=dict)
    depths: dict[str, int] = field(default_factory=dict)


class Observer:
    def __init__(self, supervisor: Supervisor, config: Config) -> None:
        self._redis, self._run = supervisor.redis.client() if supervisor.redis else None, config.run.name
        self._trainer_token = _authorization(config.trainer.server)
        self._rollout_token = _authorization(config.rollout.server)
        servers = {"trainer": config.trainer.server, "rollout": config.rollout.server, "reward": config.reward.server}
        channels = {
            name: grpc.insecure_channel(host_and_port(from_this_machine(servers[name.split("-")[0]].host), port))
            for name, port in supervisor.grpc_ports.items()
        }
        self._trainer = trainer_pb2_grpc.TrainerServiceStub(channels["trainer"])
        self._rollouts = {
            name: rollout_pb2_grpc.RolloutServiceStub(channel)
            for name, channel in channels.items()
            if name.startswith("rollout")
        }

    def observe(self) -> Observation:
        trainer = None
        try:
            asked = trainer_pb2.TrainerServiceGetStatusRequest()
            trainer = self._trainer.GetStatus(asked, timeout=TIMEOUT_SECONDS, metadata=self._trainer_token)
        except grpc.RpcError:
            trainer = None
        rollouts = {}
        for name, stub in self._rollouts.items():
            try:
                request = rollout_pb2.RolloutServiceGetStatusRequest()
                rollouts[name] = stub.GetStatus(request, timeout=TIMEOUT_SECONDS, metadata=self._rollout_token)
            except grpc.RpcError:
                continue
        return Observation(trainer, rollouts, self._depths())

    def _depths(self) -> dict[str, int]:
        if self._redis is None:
            return {}
        try:
            return {name: self._redis.xlen(f"{self._run}:{name}") for name in STREAMS}
        except redis.RedisError:
            return {}


def _authorization(server: ServerConfig) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {server.token}"),) if server.token else ()


@contextmanager
def observing(observer: Observer, show: Callable[[Observation], None]) -> Iterator[None]:
    """Shows what is seen from a thread of its own: a service slow to answer must not delay the end of a run."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(REFRESH_SECONDS):
            show(observer.observe())

    thread = threading.Thread(target=look, name="observer", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(TIMEOUT_SECONDS)
