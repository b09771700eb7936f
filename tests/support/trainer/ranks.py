"""The two runs of the DeepSpeed tests' worker: one rank alone, and two, which wait for each other's checkpoints."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.support.trainer.model_families import make_model

ROOT = Path(__file__).parents[3]
WORKER = str(ROOT / "tests" / "integration" / "ranks_worker.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SECONDS = 400
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
SENT = ("qwen3_moe", "deepseek_v3")


def make_models(directory: Path) -> None:
    """What the worker finds in `directory`, a folder for each part of it."""
    engine = directory / "engine"
    make_model("qwen3_moe").save_pretrained(engine / "model")
    make_model("qwen3_moe", num_experts=4).save_pretrained(engine / "other")
    (engine / "model" / "tokenizer_config.json").write_text('{"chat_template": "x"}', encoding="utf-8")
    make_model("qwen3_moe", **LARGE).save_pretrained(directory / "sharded" / "large")
    for family, overrides in FAMILIES.items():
        make_model(family, **overrides).save_pretrained(directory / "sharded" / "families" / family)
    for family in SENT:
        make_model(family).to(torch.bfloat16).save_pretrained(directory / "weights" / family / "model")


def run_workers(directory: Path) -> None:
    """Both at once. Fails with what they said when one does, or when they take too long."""
    environment = {
        **{key: value for key, value in os.environ.items() if key not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}},
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}",
        "OMP_NUM_THREADS": "1",
        # Else glibc keeps what was freed for blocks of up to 32 MiB: a larger model's parameters are over that anyway.
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }
    logs = [directory / f"{name}.log" for name in ("alone", "two")]
    running = [
        subprocess.Popen(
            [sys.executable, *launcher, WORKER, str(directory)],
            env=environment,
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
        )
        for launcher, log in zip(([], TORCHRUN), logs, strict=True)
    ]
    deadline = time.monotonic() + SECONDS
    try:
        while any(process.poll() is None for process in running):
            assert not any(process.poll() for process in running), said(logs)
            assert time.monotonic() < deadline, f"not done within {SECONDS} s\n{said(logs)}"
            time.sleep(0.1)
        assert not any(process.returncode for process in running), said(logs)
    finally:
        for process in running:
            process.terminate()
            process.wait(20)


def said(logs: list[Path]) -> str:
    return "\n".join(f"{log.name}:\n{log.read_text(encoding='utf-8', errors='replace')[-6000:]}" for log in logs)
