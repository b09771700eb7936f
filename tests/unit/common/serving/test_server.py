import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from trivet.v1 import trainer_pb2, trainer_pb2_grpc

from services.common.config import ServerConfig
from services.common.serving.server import ServiceServer

NAME = "trivet.v1.TrainerService"
TOKEN = "a-token-of-enough-length"
MOST = 10_000


class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    async def GetStatus(self, request, context):
        return trainer_pb2.TrainerServiceGetStatusResponse(run="run")


@pytest.fixture
async def served(request, monkeypatch):
    monkeypatch.setattr("services.common.serving.server.MAX_MESSAGE_BYTES", MOST)
    problem: list[str | None] = [None]
    server = ServiceServer(
        ServerConfig(token=request.param),
        grpc_name=NAME,
        register=lambda target: trainer_pb2_grpc.add_TrainerServiceServicer_to_server(Trainer(), target),
        ready=lambda: problem[0],
    )
    await server.start()
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}") as http,
    ):
        yield channel, http, problem
    await server.stop()


def status(channel, **options):
    return trainer_pb2_grpc.TrainerServiceStub(channel).GetStatus(
        trainer_pb2.TrainerServiceGetStatusRequest(), timeout=5, **options
    )


@pytest.mark.parametrize("served", [None], indirect=True)
async def test_grpc_and_http_side_by_side(served):
    channel, http, problem = served
    assert (await status(channel)).run == "run"
    assert (await http.get("/healthz")).status_code == 200
    assert "trivet_build_info" in (await http.get("/metrics")).text
    assert (await http.get("/readyz")).status_code == 200
    problem[0] = "loading"
    answer = await http.get("/readyz")
    assert (answer.status_code, answer.json()) == (503, {"status": "loading"})


@pytest.mark.parametrize("served", [None], indirect=True)
async def test_health_and_reflection(served):
    channel, _, _ = served
    health = health_pb2_grpc.HealthStub(channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service=NAME), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5)
    names = [service.name async for reply in call for service in reply.list_services_response.service]
    assert NAME in names


@pytest.mark.parametrize("served", [TOKEN], indirect=True)
async def test_a_token_is_asked_for_except_by_health(served):
    channel, http, _ = served
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await status(channel)
    assert refusal.value.code() == grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(grpc.aio.AioRpcError):
        await status(channel, metadata=(("authorization", "Bearer wrong"),))
    assert (await status(channel, metadata=(("authorization", f"Bearer {TOKEN}"),))).run == "run"
    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert (await http.get("/metrics")).status_code == 401
    assert (await http.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"})).status_code == 200
    assert (await http.get("/healthz")).status_code == 200


@pytest.mark.parametrize("served", [TOKEN], indirect=True)
async def test_a_message_without_the_token_is_refused_unread(served):
    channel, _, _ = served
    large = bytes(MOST + 1)

    async def code(method, **options):
        try:
            await channel.unary_unary(method)(large, timeout=5, **options)
        except grpc.aio.AioRpcError as refusal:
            return refusal.code()
        return grpc.StatusCode.OK

    # Whoever reads it finds that it is too large; who does not read it cannot know.
    allowed = {"metadata": (("authorization", f"Bearer {TOKEN}"),)}
    assert await code(f"/{NAME}/GetStatus", **allowed) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await code(f"/{NAME}/GetStatus") == grpc.StatusCode.UNAUTHENTICATED
    assert await code(f"/{NAME}/NoSuchMethod") == grpc.StatusCode.UNIMPLEMENTED
    assert await code("/grpc.health.v1.Health/Check") == grpc.StatusCode.OK
    answers = channel.unary_stream("/grpc.health.v1.Health/Watch")(large, timeout=5)
    assert health_pb2.HealthCheckResponse.FromString(await answers.read()).status
    answers.cancel()
