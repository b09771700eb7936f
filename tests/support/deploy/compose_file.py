"""What Compose itself makes of the deployment's files; no engine is needed."""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
FILES = {"gpu": ("docker-compose.yml",), "cpu": ("docker-compose.yml", "docker-compose.cpu.yml")}
OWN = ("prepare", "rollout", "reward", "trainer")
BOUGHT = ("redis", "prometheus", "alertmanager", "grafana")


def program(name: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found is not None, f"{name} is missing: it comes with requirements/cpu.txt"
    return found


def compose(kind: str, *arguments: str, **settings: str) -> str:
    files = [part for name in FILES[kind] for part in ("-f", str(DEPLOY / name))]
    # An .env of the developer's own must not decide what is tested.
    command = [program("docker-compose"), *files, "--env-file", os.devnull, *arguments]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **settings}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@functools.cache
def project(kind: str) -> dict[str, Any]:
    """The whole project as JSON, every default and merge applied."""
    loaded: dict[str, Any] = json.loads(compose(kind, "config", "--format", "json"))
    return loaded


def services(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = project(kind)["services"]
    return found
