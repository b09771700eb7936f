"""A whole system on one machine for tests to disturb: real Redis, vLLM, scorers and DeepSpeed, each its own process."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import redis
import yaml
from trivet.v1 import rollout_pb2, rollout_pb2_grpc

from services.cli.shared.processes import ServiceProcess, free_port
from services.common.config import Config, parse_config
from services.common.run_files.run_log import RunLog

ONE_THREAD = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class System:
    def __init__(self, directory: Path, tree: dict) -> None:
        self.directory = directory
        self.redis_port, self.trainer_port = free_port(), free_port()
        tree = {
            **tree,
            "run": {"name": "system", "seed": 1, "directory": str(directory / "runs")},
            "redis": {"url": f"redis://127.0.0.1:{self.redis_port}/0", "claim_idle_seconds": 3.0},
        }
        tree["trainer"] = {**tree["trainer"], "server": {"grpc_port": self.trainer_port}}
        self.config: Config = parse_config(tree)
        self.file = directory / "system.yaml"
        self.file.write_text(yaml.safe_dump(tree), encoding="utf-8")
        (directory / "redis").mkdir()
        self.processes = {"redis": self._process("redis", "services.cli.up.redis_server", self._redis_arguments())}
        self.client = redis.Redis(port=self.redis_port)
        self.run_log = RunLog(self.config.run.path)

    def start(self, *names: str) -> None:
        """Each name is a service, with a number behind it where there are several."""
        for name in names:
            if name not in self.processes:
                module = f"services.{name.rstrip('0123456789-')}"
                self.processes[name] = self._process(name, module, ["--config", str(self.file)])
            self.processes[name].start()

    def kill(self, name: str) -> None:
        """As a crash would: no warning, children too."""
        self.processes[name].kill()

    def stop(self) -> None:
        *services, broker = [self.processes[name] for name in sorted(self.processes, key=lambda name: name == "redis")]
        for together in (services, [broker]):
            for process in together:
                process.terminate()
            deadline = time.monotonic() + 10
            for process in together:
                process.wait(deadline)

    def until(self, condition: Callable[[], bool], what: str, timeout_seconds: float = 180) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not condition():
            for name, process in self.processes.items():
                code = process.exit_code()
                assert code in (None, 0, -9), f"{name} ended with {code}:\n{process.last_lines(40)}"
            assert time.monotonic() < deadline, f"no {what} within {timeout_seconds} s\n{self.logs()}"
            time.sleep(0.1)

    def until_step(self, step: int) -> None:
        self.until(lambda: any(entry["step"] >= step for entry in self.run_log.steps()), f"step {step}")

    def until_sampling(self, name: str) -> None:
        self.until(lambda: self._event(name, "sampling") is not None, f"{name} that samples")

    def until_busy(self, name: str) -> None:
        """Until the rollout has taken prompts that it has not handed on."""
        serving = self._serving(name)["rollout"]

        def busy() -> bool:
            consumers = self.client.xinfo_consumers("system:prompts", "rollout")
            return any(each["name"].decode() == serving and each["pending"] for each in consumers)

        self.until(busy, f"{name} at work")

    def http_port(self, name: str) -> int:
        """Waits until the service answers."""
        self.until(lambda: self._event(name, "serving") is not None, f"{name} that serves")
        return int(self._serving(name)["http_port"])

    def running(self, name: str) -> bool:
        return self.processes[name].exit_code() is None

    def until_redis(self) -> None:
        def answers() -> bool:
            try:
                return bool(self.client.ping())
            except redis.exceptions.ConnectionError:
                return False

        self.until(answers, "answer from Redis", 20)

    def until_finished(self) -> None:
        self.until(lambda: self.processes["trainer"].exit_code() == 0, "end of the training", 240)

    def address(self, name: str) -> str:
        """Of its gRPC service."""
        return f"127.0.0.1:{self._serving(name)['grpc_port']}"

    def until_version(self, rollout: str, version: int, token: str) -> rollout_pb2.RolloutServiceGetStatusResponse:
        """Until it samples with these weights."""
        with grpc.insecure_channel(self.address(rollout)) as channel:
            stub = rollout_pb2_grpc.RolloutServiceStub(channel)

            def status() -> rollout_pb2.RolloutServiceGetStatusResponse:
                request = rollout_pb2.RolloutServiceGetStatusRequest()
                return stub.GetStatus(request, timeout=20, metadata=(("authorization", f"Bearer {token}"),))

            self.until(lambda: status().version == version, f"version {version} in {rollout}", 60)
            return status()

    def events(self, name: str) -> list[dict[str, Any]]:
        """All that the service has logged, in all its lives."""
        log = self.processes[name].log
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{")]

    def _serving(self, name: str) -> dict[str, Any]:
        found = self._event(name, "serving")
        assert found is not None
        return found

    def _event(self, name: str, event: str) -> dict[str, Any] | None:
        return next((each for each in self.events(name) if each["event"] == event), None)

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{process.last_lines(25)}" for name, process in self.processes.items())

    def _process(self, name: str, module: str, arguments: list[str]) -> ServiceProcess:
        command = [sys.executable, "-m", module, *arguments]
        return ServiceProcess(name, command, self.directory / f"{name}.log", ONE_THREAD)

    def _redis_arguments(self) -> list[str]:
        return ["--directory", str(self.directory / "redis"), "--port", str(self.redis_port)]
