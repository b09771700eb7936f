"""What a server's host may be: the same for gRPC, HTTP, and whoever calls them."""

import socket

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import ValidationError

from services.common.config import ConfigError, ServerConfig, parse_config
from services.common.config.addresses import from_this_machine, host_and_port, is_loopback, listen
from services.common.serving.server import ServiceServer


def server(host, **ports):
    return ServiceServer(ServerConfig(host=host, **ports), grpc_name="s", register=lambda _: None, ready=lambda: None)


@pytest.mark.parametrize("host", ["::1", "[::1]", "::", "127.0.0.1", "0.0.0.0", "localhost", socket.gethostname()])
async def test_grpc_and_http_answer_at_every_form_of_a_host(host):
    made = server(host)
    await made.start()
    near = from_this_machine(ServerConfig(host=host).host)
    async with (
        grpc.aio.insecure_channel(host_and_port(near, made.grpc_port)) as channel,
        httpx.AsyncClient(base_url=f"http://{host_and_port(near, made.http_port)}", trust_env=False) as http,
    ):
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert (await http.get("/readyz")).status_code == 200
    await made.stop()


async def test_every_ipv6_address_is_every_ipv4_address_too():
    made = server("::")
    await made.start()
    async with httpx.AsyncClient(trust_env=False) as http:
        assert (await http.get(f"http://127.0.0.1:{made.http_port}/healthz")).status_code == 200
    await made.stop()


def test_a_name_with_several_addresses_gets_one_port(monkeypatch):
    both = [
        (family, socket.SOCK_STREAM, 6, "", address)
        for family, address in ((socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_INET6, ("::1", 0, 0, 0)))
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    sockets = listen("localhost", 0)
    assert [opened.getsockname()[0] for opened in sockets] == ["127.0.0.1", "::1"]
    assert len({opened.getsockname()[1] for opened in sockets}) == 1
    for opened in sockets:
        opened.close()


@pytest.mark.parametrize("kind", ["grpc", "http"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_a_port_that_is_taken_is_named(kind, host):
    first = server(host)
    await first.start()
    port = getattr(first, f"{kind}_port")
    with pytest.raises(OSError, match=rf"\.server\.{kind}_port is {port}: cannot listen on .*1\]?:{port}, "):
        await server(host, **{f"{kind}_port": port}).start()
    await first.stop()


async def test_a_host_that_nobody_knows_is_named():
    with pytest.raises(OSError, match=r"cannot listen on no-such-host\.invalid:0"):
        await server("no-such-host.invalid").start()


@pytest.mark.parametrize("host", ["", "127.0.0.1:50051", "[::1]:50051", "::g", "http://host", "a b"])
def test_a_host_that_is_none_is_refused(host):
    with pytest.raises(ValidationError, match="expected a name or an address without a port"):
        ServerConfig(host=host)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("[::1]", True),
        ("0:0:0:0:0:0:0:1", True),
        ("::ffff:127.0.0.1", True),
        ("::", False),
        ("0.0.0.0", False),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("127.0.0.1.example.com", False),
        ("trainer", False),
    ],
)
def test_without_a_token_only_this_machine_may_call(host, loopback):
    tree = {
        "run": {"name": "run"},
        "model": {"path": "model"},
        "data": {"train": {"kind": "jsonl", "path": "train.jsonl"}},
        "reward": {"scorers": [{"name": "exact_match"}]},
        "trainer": {"server": {"host": host}},
    }
    assert is_loopback(ServerConfig(host=host).host) == loopback
    if loopback:
        parse_config(tree)
        return
    with pytest.raises(ConfigError, match=r"trainer\.server\.token is missing"):
        parse_config(tree)
