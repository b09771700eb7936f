"""A rollout's gRPC service around any engine, without streams."""

import contextlib
from pathlib import Path

from trivet.v1 import rollout_pb2_grpc

from services.common.config import ServerConfig
from services.common.serving.server import ServiceServer
from services.rollout.groups.sampler import GroupSampler
from services.rollout.service import GRPC_NAME, RolloutServicer
from services.rollout.weights.follower import WeightFollower


class NoPrompts:
    paused = False


class NoFeed:
    def latest(self):
        return None


@contextlib.asynccontextmanager
async def serving(engine, transfer, token=None):
    """Yields the port."""
    servicer = RolloutServicer(
        GroupSampler(engine, rollout_id="r", code="c", config="k"),
        WeightFollower(engine, NoFeed(), timeout_seconds=1, directory=Path("weights")),
        NoPrompts(),
        limit=1,
        transfer=transfer,
    )
    server = ServiceServer(
        ServerConfig(token=token),
        grpc_name=GRPC_NAME,
        register=lambda target: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, target),
        ready=lambda: engine.problem,
    )
    await server.start()
    try:
        yield server.grpc_port
    finally:
        await server.stop()
