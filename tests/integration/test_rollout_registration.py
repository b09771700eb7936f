"""The rollout's process, as it registers for weights from memory and leaves again; its engine has no model."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from trivet.v1 import rollout_pb2, rollout_pb2_grpc

from services.common.config import RedisConfig, WeightsConfig
from services.common.transport.rollout_registry import RolloutRegistry
from tests.support.vllm_models import configuration

ROOT = Path(__file__).parents[2]
START_SECONDS = 60


@pytest.fixture
def registry(redis_client):
    return RolloutRegistry(redis_client, "test")


def test_a_rollout_that_runs_is_registered_and_one_that_ended_is_not(registry, redis_url, tmp_path):
    config = configuration(tmp_path / "model", top_k=20)
    changed = {"redis": RedisConfig(url=redis_url), "weights": WeightsConfig(transfer="nccl")}
    changed["trainer"] = config.trainer.model_copy(update={"device": "auto"})
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(config.model_copy(update=changed).dump()))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.rollout_process", "--config", str(file)]
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=(tmp_path / "log").open("wb"))
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (found := registry.alive()):
            assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (entry,) = found
        assert list(entry.devices) == [""]
        with grpc.insecure_channel(entry.address) as channel:
            stub = rollout_pb2_grpc.RolloutServiceStub(channel)
            status = stub.GetStatus(rollout_pb2.RolloutServiceGetStatusRequest(), timeout=10)
        assert (status.rollout_id, status.engine) == (entry.rollout_id, entry.engine)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert registry.alive() == []
    finally:
        process.kill()
        process.wait(10)
