"""The Compose project under check: a copy of its files, with secrets and settings of its own."""

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.containers.engine import Engine, program

ROOT = Path(__file__).resolve().parents[2]
RUN = "quickstart"
COMPOSE_SECONDS = 900
# Beside the services: everything but Grafana, whose image has no stand-in among Debian's packages.
SERVICES = ("redis", "rollout", "reward", "trainer", "prometheus", "alertmanager")


class Deployment:
    def __init__(self, engine: Engine, directory: Path, settings: dict[str, str]) -> None:
        self._engine, self._directory = engine, directory
        self._settings = dict(settings)
        for folder in ("deploy", "configs"):
            shutil.copytree(
                ROOT / folder, directory / folder, ignore=shutil.ignore_patterns("secrets", ".env", "schema")
            )
        self._deploy = directory / "deploy"
        subprocess.run(["sh", str(self._deploy / "secrets.sh")], check=True, timeout=20)
        self.set()

    def set(self, **settings: str) -> None:
        """Of .env; `up` puts it into effect."""
        self._settings.update(settings)
        (self._deploy / ".env").write_text("".join(f"{name}={value}\n" for name, value in self._settings.items()))

    def compose(self, *arguments: str, timeout: float = COMPOSE_SECONDS) -> str:
        files = ["docker-compose.yml", "docker-compose.cpu.yml"]
        ended = subprocess.run(
            [program("docker-compose"), *(part for name in files for part in ("-f", name)), *arguments],
            cwd=self._deploy,
            env=self._engine.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert ended.returncode == 0, f"compose {' '.join(arguments)}\n{ended.stdout}\n{ended.stderr}\n{self.logs()}"
        return ended.stdout

    def project(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads(self.compose("config", "--format", "json"))
        return loaded

    def build(self) -> None:
        """As `docker compose build` would, with the engine's own builder, from the checkout."""
        built = set()
        for service in self.project()["services"].values():
            how = service.get("build")
            if how is None or service["image"] in built:
                continue
            built.add(service["image"])
            target = ["--target", how["target"]] if "target" in how else []
            self._engine.build(service["image"], "--file", str(ROOT / how["dockerfile"]), *target, str(ROOT))

    def up(self, *arguments: str) -> None:
        self.compose("up", "--detach", "--no-build", "--pull=never", *arguments)

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout=5")

    def containers(self, service: str) -> list[dict[str, Any]]:
        """What the engine knows of the containers of `service`, ended ones too."""
        ids = self.compose("ps", "--all", "--quiet", service).split()
        found: list[dict[str, Any]] = json.loads(self._engine.docker("inspect", *ids).stdout) if ids else []
        return found

    def healthy(self, service: str, count: int = 1) -> bool:
        states = [container["State"] for container in self.containers(service)]
        return len(states) == count and all(
            state["Running"] and state.get("Health", {}).get("Status") == "healthy" for state in states
        )

    def run_in(self, service: str, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        container = self.containers(service)[0]["Id"]
        return self._engine.docker("exec", container, *command, check=check)

    def records(self, name: str) -> list[dict[str, Any]]:
        """The lines of one of the run's record files, read by a container of their volume."""
        read = "import pathlib, sys; path = pathlib.Path(sys.argv[1]); print(path.read_text() if path.exists() else '')"
        arguments = ["run", "--rm", "--volume=trivet_runs:/runs:ro", "--network=none", "--entrypoint=python"]
        image = self.project()["services"]["reward"]["image"]
        text = self._engine.docker(*arguments, image, "-c", read, f"/runs/{RUN}/{name}").stdout
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def step(self) -> int:
        return max((record["step"] for record in self.records("steps.jsonl")), default=0)

    def until(self, condition: Callable[[], bool], what: str, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {timeout_seconds} s\n{self.logs()}"
            time.sleep(1)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """An instant query of the deployment's Prometheus, at the port that it publishes on loopback."""
        parameters = urllib.parse.urlencode({"query": expression})
        address = f"http://127.0.0.1:{self._settings['PROMETHEUS_PORT']}/api/v1/query?{parameters}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        found: list[dict[str, Any]] = body["data"]["result"]
        return found

    def logs(self) -> str:
        ended = subprocess.run(
            [program("docker-compose"), "-f", "docker-compose.yml", "logs", "--no-color", "--tail=30"],
            cwd=self._deploy,
            env=self._engine.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return ended.stdout[-20_000:] + ended.stderr


@contextmanager
def deployed(engine: Engine, directory: Path, settings: dict[str, str]) -> Iterator[Deployment]:
    deployment = Deployment(engine, directory, settings)
    try:
        yield deployment
    finally:
        deployment.down()
