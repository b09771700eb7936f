"""A Docker engine of the check's own, separate from any that the machine may have. Needs root."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import IO

START_SECONDS = 60
BUILD_SECONDS = 900


class Engine:
    """Containers get bridge networks and names, as everywhere, but no way out of this machine: no packet filter of
    the machine is touched, so nothing is translated. What is built uses the machine's own network.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("DOCKER_", "COMPOSE_"))},
            "DOCKER_HOST": f"unix://{directory / 'socket'}",
            "DOCKER_BUILDKIT": "1",
            "DOCKER_CONFIG": str(directory / "client"),
        }

    def start(self) -> None:
        self._log = (self._directory / "dockerd.log").open("wb")
        self._process = subprocess.Popen(
            [
                program("dockerd"),
                "--bridge=none",
                "--iptables=false",
                "--ip6tables=false",
                "--ip-forward=false",
                f"--data-root={self._directory / 'data'}",
                f"--exec-root={self._directory / 'exec'}",
                f"--host={self.environment['DOCKER_HOST']}",
                f"--pidfile={self._directory / 'pid'}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + START_SECONDS
        while self.docker("info", check=False).returncode != 0:
            assert self._process.poll() is None, f"dockerd ended:\n{self.log()}"
            assert time.monotonic() < deadline, f"dockerd does not answer:\n{self.log()}"
            time.sleep(0.2)

    def stop(self) -> None:
        """With everything that it held."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(60)
        if self._log is not None:
            self._log.close()
        shutil.rmtree(self._directory / "data", ignore_errors=True)

    def docker(
        self, *arguments: str, check: bool = True, timeout: float = 60, stdin: IO[bytes] | None = None, text: str = ""
    ) -> subprocess.CompletedProcess[str]:
        ended = subprocess.run(
            [client(), *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            **({"stdin": stdin} if stdin else {"input": text}),
        )
        assert not check or ended.returncode == 0, f"docker {' '.join(arguments)}\n{ended.stdout}\n{ended.stderr}"
        return ended

    def build(self, tag: str, *arguments: str, text: str = "") -> None:
        self.docker("build", "--network=host", f"--tag={tag}", *arguments, timeout=BUILD_SECONDS, text=text)

    def log(self) -> str:
        return (self._directory / "dockerd.log").read_text(errors="replace")[-4000:]


def client() -> str:
    """The client that came with the engine: another one earlier on the path may not speak its version."""
    bundled = Path(program("dockerd")).parent.parent / "bin/docker"
    return str(bundled) if bundled.exists() else program("docker")


def program(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    assert found is not None, f"{name} is missing: `make containers-check` installs it"
    return found
