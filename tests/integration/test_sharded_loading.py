"""ZeRO-3 from the first byte: two ranks load what neither holds whole, with real DeepSpeed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_families import make_model

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
# Tied and fused; biases; routing biases in buffers; a layer that reads its children's weights; refused.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "phi": {},
    "gpt_oss": {},
    "deepseek_v3": {},
    "qwen3_next": {},
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
}
LARGE = {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 16, "num_hidden_layers": 32}


@pytest.fixture(scope="module")
def size(directory: Path) -> int:
    """Bytes of the large model's parameters, of which a layer has a thirty-second."""
    model = make_model("qwen3_moe", **LARGE)
    model.save_pretrained(directory / "large")
    return sum(int(parameter.nbytes) for parameter in model.parameters())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def results(directory: Path, size: int) -> list[dict[str, Any]]:
    assert size > 200e6
    for family, overrides in FAMILIES.items():
        make_model(family, **overrides).save_pretrained(directory / "families" / family)
    environment = {
        **{key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}},
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}",
        "OMP_NUM_THREADS": "1",
        # Else glibc keeps what was freed for blocks of up to 32 MiB: a larger model's parameters are over that anyway.
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "tests" / "integration" / "sharded_worker.py"), str(directory)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-6000:]
    return [json.loads((directory / f"results-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


def test_no_rank_holds_much_more_than_its_part(results: list[dict[str, Any]], size: int) -> None:
    """The part is a half; the rest is what a few layers take while one is read, fused, sent and probed."""
    for found in results:
        memory = found["memory"]
        assert memory["loading"] < 0.75 * size, memory
        assert memory["reference"] < 0.75 * size, memory
        assert memory["computing"] < 0.25 * size, memory
        # The measure sees what it is to see.
        assert memory["whole"] > size, memory


def test_a_reference_that_is_cut_computes_as_a_whole_one(results: list[dict[str, Any]]) -> None:
    assert [found["memory"]["gap"] < 1e-5 for found in results] == [True, True]


def test_what_the_ranks_hold_together_is_what_a_plain_load_gives(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["families"].keys() == {f"{name} {dtype}" for name in FAMILIES for dtype in ("float32", "bfloat16")}
        assert not any(found["families"].values()), found["families"]
