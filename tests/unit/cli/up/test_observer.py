"""The live view reaches services wherever they listen."""

from types import SimpleNamespace

import pytest
from trivet.v1 import trainer_pb2, trainer_pb2_grpc

from services.cli.up.observation import Observer
from services.common.config import ServerConfig, parse_config
from services.common.serving.server import BackgroundServer, ServiceServer

TOKEN = "a-token-of-enough-length"


class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    async def GetStatus(self, request, context):
        return trainer_pb2.TrainerServiceGetStatusResponse(run="seen")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "0.0.0.0", "::"])
def test_the_trainer_is_seen_at_every_host(host):
    server = ServerConfig(host=host, token=TOKEN)
    background = BackgroundServer(
        lambda: ServiceServer(
            server,
            grpc_name="trivet.v1.TrainerService",
            register=lambda target: trainer_pb2_grpc.add_TrainerServiceServicer_to_server(Trainer(), target),
            ready=lambda: None,
        )
    )
    config = parse_config(
        {
            "run": {"name": "run"},
            "model": {"path": "model"},
            "data": {"train": {"kind": "jsonl", "path": "train.jsonl"}},
            "reward": {"scorers": [{"name": "exact_match"}]},
            "trainer": {"server": server.model_dump()},
        }
    )
    port = background.start().grpc_port
    try:
        seen = Observer(SimpleNamespace(redis=None, grpc_ports={"trainer": port}), config).observe()
    finally:
        background.stop()
    assert seen.trainer is not None
    assert seen.trainer.run == "seen"
