"""A version from memory under ZeRO-3, with real DeepSpeed on two ranks: gathered in step, also when a rollout fails."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.model_families import make_model

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    make_model(request.param).to(torch.bfloat16).save_pretrained(directory / "model")
    environment = {
        **{key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}},
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "tests" / "integration" / "weights_worker.py"), str(directory)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-6000:]
    return directory


@pytest.fixture
def results(directory: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((directory / "results.json").read_text(encoding="utf-8"))
    return loaded


def test_what_goes_over_the_wire_is_the_model(directory: Path) -> None:
    expected, sent = load_file(directory / "model" / "model.safetensors"), load_file(directory / "memory.safetensors")
    assert sent.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(sent[name].to(tensor.dtype), tensor), name


def test_both_ranks_go_on_together_when_a_rollout_fails(results: dict[str, Any]) -> None:
    assert results["versions"] == [0, 1, 2, 3]
    # The first, and the one that failed.
    assert results["on disk"] == [True, False, True, False]
    assert results["taken over"] == [0, 1, 2, 3]
    assert results["last"] == 3
    assert results["parts"] > 1
    assert results["exported bytes"] == results["bytes"]
