"""`trivet audit` with the real vLLM: by itself, and against a rollout that runs and has been given new weights."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
import yaml
from safetensors.numpy import load_file, save_file
from trivet.v1 import rollout_pb2, rollout_pb2_grpc

from services.cli.audit.processes import own_rollout
from services.common.config import load_config
from services.common.run_files.audit_report import AuditReport
from services.common.transport.weight_feed import describe_weights

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
TOKEN = "a-token-of-sixteen-or-more"
TRUNCATING = {"group_size": 8, "temperature": 1.0, "top_k": 0, "top_p": 0.8, "max_tokens": 16}


@pytest.fixture
def config_file(quickstart_model: Path, tmp_path: Path) -> Path:
    tree = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    del tree["prepare"]
    tree["run"]["directory"] = str(tmp_path / "runs")
    tree["model"]["path"] = str(quickstart_model)
    tree["data"]["train"]["path"] = str(quickstart_model / "train.jsonl")
    tree["data"]["validation"]["path"] = str(quickstart_model / "validation.jsonl")
    tree["sampling"] = TRUNCATING
    # That of a run which continues somewhere else: an audit's own rollout must leave it alone.
    tree["redis"] = {"url": "redis://127.0.0.1:1/0"}
    tree["rollout"]["server"] = {"host": "0.0.0.0", "token": TOKEN}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return file


def audit(config_file: Path, *arguments: str, token: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "services.cli", "audit", "--config", str(config_file), *arguments]
    environment = {**os.environ, "TRIVET_TOKEN": token, "COLUMNS": "100"}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)


@pytest.mark.timeout(300)
def test_sampler_and_trainer_agree_and_the_mask_is_what_makes_them(config_file: Path, leftovers) -> None:
    ended = audit(config_file, "--samples", "128")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "✓ sampler and trainer agree" in ended.stdout
    assert leftovers.found() == []

    report = AuditReport.read(config_file.parent / "runs" / "quickstart" / "audit.json")
    assert report.samples == 128
    assert (report.model_type, report.dtype, report.weights_version) == ("qwen3_moe", "float32", 0)
    assert report.configured == ("routing", "candidates")
    assert not report.refused
    both, no_candidates = report.row("routing", "candidates"), report.row("routing")
    assert both.difference_max <= 1e-5
    assert both.ratio_mean == pytest.approx(1, abs=1e-5)
    assert both.agreement == (1.0, 1.0)
    facts = report.candidates
    assert facts.inside == facts.positions == report.tokens
    assert facts.summed_positions > 0
    assert facts.sum_error_max <= 1e-5
    # The nucleus holds at least top_p, and the ratio without candidate sets is short by what it leaves out.
    assert 0.8 - 1e-5 <= facts.mass_min < facts.mass_mean < 0.97
    for row in (no_candidates, report.row()):
        assert row.ratio_mean == pytest.approx(facts.mass_mean, abs=1e-4)
        assert row.mismatch_kl > 1e-4

    for label in ("both ◀", "no candidates", "no routing", "neither"):
        assert f" {label} " in ended.stdout
    assert f"{no_candidates.ratio_mean:.5f}" in ended.stdout
    assert f"{report.tokens} of {report.tokens}" in ended.stdout


@pytest.mark.timeout(300)
def test_a_running_rollout_is_audited_under_the_weights_it_has(config_file: Path, quickstart_model: Path) -> None:
    config = load_config(config_file)
    published = publish(quickstart_model, config.run.path / "weights")
    with own_rollout(config, config_file, [], time.monotonic() + 200) as address:
        load_weights(address, published)
        ended = audit(config_file, "--rollout", address, "--samples", "32", token=TOKEN)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        report = AuditReport.read(config.run.path / "audit.json")
        assert (report.weights_version, report.weights_path) == (7, published.path)
        assert report.row("routing", "candidates").difference_max <= 1e-5

        shutil.rmtree(published.path)
        lost = audit(config_file, "--rollout", address, "--samples", "32")
        assert lost.returncode == 2
        assert f"version 7 (fingerprint {published.fingerprint})" in lost.stdout


def publish(model: Path, weights: Path):
    """Version 7: the model with another output and routers, as a step of training would leave it."""
    staged = weights / "staging"
    shutil.copytree(model, staged)
    for file in staged.glob("*.safetensors"):
        tensors = {name: value * (1.1 if "gate" in name else 0.95) for name, value in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    described = describe_weights(staged, 7)
    final = weights / f"v000007-{described.fingerprint[:8]}"
    staged.rename(final)
    described.path = str(final)
    return described


def load_weights(address: str, weights) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        request = rollout_pb2.LoadWeightsRequest(weights=weights)
        loaded = stub.LoadWeights(request, timeout=60, metadata=(("authorization", f"Bearer {TOKEN}"),))
        assert loaded.version == 7
