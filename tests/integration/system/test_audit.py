"""`trivet audit` with the real vLLM: by itself, and against a rollout that runs and has been given new weights."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from services.common.run_files.audit_report import AuditReport
from tests.support.runs.disturbed_run import TOKEN, Finished
from tests.support.runs.quickstart_run import quickstart_tree

TRUNCATING = {"group_size": 8, "temperature": 1.0, "top_k": 0, "top_p": 0.8, "max_tokens": 16}


@pytest.fixture
def config_file(quickstart_model: Path, tmp_path: Path) -> Path:
    tree = quickstart_tree(quickstart_model)
    tree["run"]["directory"] = str(tmp_path / "runs")
    tree["sampling"] = TRUNCATING
    # That of a run which continues somewhere else: an audit's own rollout must leave it alone.
    tree["redis"] = {"url": "redis://127.0.0.1:1/0"}
    tree["rollout"]["server"] = {"host": "0.0.0.0", "token": TOKEN}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return file


def audit(config_file: Path, *arguments: str, token: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "services.cli", "audit", str(config_file), *arguments]
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


def test_a_running_rollout_is_audited_under_the_weights_it_has(finished: Finished) -> None:
    system = finished.system
    newest = system.run_log.steps()[-1]["step"]
    status = system.until_version("rollout-0", newest, TOKEN)
    ended = audit(system.file, "--rollout", system.address("rollout-0"), "--samples", "32", token=TOKEN)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = AuditReport.read(system.config.run.path / "audit.json")
    assert report.weights_version == newest
    assert Path(report.weights_path).parent == system.config.run.path / "weights"
    assert report.row("routing", "candidates").difference_max <= 1e-5

    shutil.rmtree(report.weights_path)
    lost = audit(system.file, "--rollout", system.address("rollout-0"), "--samples", "32")
    assert lost.returncode == 2
    assert f"version {newest} (fingerprint {status.fingerprint})" in lost.stdout
