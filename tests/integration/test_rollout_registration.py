"""The rollout's own process: it registers for weights from memory and leaves again, or does not start."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from safetensors.torch import load_file, save_file
from trivet.v1 import rollout_pb2, rollout_pb2_grpc

from services.common.config import RedisConfig, WeightsConfig
from services.common.transport.rollout_registry import RolloutRegistry
from tests.support.rollout.vllm_models import configuration, make_model

ROOT = Path(__file__).parents[2]
START_SECONDS = 60
VLLM_SECONDS = 180


@pytest.fixture
def registry(redis_client):
    return RolloutRegistry(redis_client, "test")


def start(redis_url, directory, model, module):
    config = configuration(model, top_k=20)
    changed = {"redis": RedisConfig(url=redis_url), "weights": WeightsConfig(transfer="nccl")}
    changed["trainer"] = config.trainer.model_copy(update={"device": "auto"})
    file = directory / "run.yaml"
    file.write_text(json.dumps(config.model_copy(update=changed).dump()))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, "--config", str(file)]
    return subprocess.Popen(command, env=environment, cwd=directory, stderr=(directory / "log").open("wb"))


def test_a_vllm_that_does_not_start_ends_the_rollout_with_its_own_reason_first(redis_url, tmp_path):
    model = make_model(tmp_path / "model", 1)
    (weights,) = model.glob("*.safetensors")
    tensors = load_file(weights)
    del tensors["model.norm.weight"]
    save_file(tensors, weights, {"format": "pt"})
    process = start(redis_url, tmp_path, model, "services.rollout")
    try:
        assert process.wait(VLLM_SECONDS) == 1
    finally:
        process.kill()
    ended = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert (ended["event"], ended["exit_code"]) == ("ended", 1)
    assert ended["reason"].startswith("ValueError: Following weights were not initialized")
    assert ended["reason"].endswith("(vLLM did not start)")


def test_a_rollout_that_runs_is_registered_and_one_that_ended_is_not(registry, redis_url, tmp_path):
    process = start(redis_url, tmp_path, tmp_path / "model", "tests.support.rollout.process")
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
