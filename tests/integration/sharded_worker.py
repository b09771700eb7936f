"""What ranks_worker does for test_sharded_loading, on two ranks.

Each rank writes what it saw to DIRECTORY/results-<rank>.json.
"""

import json
from pathlib import Path
from typing import Any

import torch

from services.common.config import Config, ReferenceConfig, parse_config
from services.common.errors import InvalidData
from services.trainer.batch.packing import pack
from services.trainer.engine.zero_sharding import ZeroSharding
from services.trainer.model.policy import Policy, load_policy
from services.trainer.update.reference import Reference, load_reference
from tests.support.trainer.model_families import make_samples


def configuration(model: Path, dtype: str) -> Config:
    return parse_config(
        {
            "run": {"name": "sharded"},
            "model": {"path": str(model), "dtype": dtype},
            "data": {"train": {"kind": "jsonl", "path": "none.jsonl"}},
            "reward": {"scorers": [{"name": "exact_match"}]},
            "trainer": {
                "device": "cpu",
                "zero_stage": 3,
                "deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}},
            },
        }
    )


def load(config: Config, sharding: ZeroSharding | None, **extra: Any) -> Policy | str:
    path, dtype = config.model.path, config.model.dtype
    try:
        return load_policy(path, dtype=dtype, device=torch.device("cpu"), sharding=sharding, **extra)
    except InvalidData as refused:
        return f"{refused.code}: {refused}"


def differences(sharded: Policy, plain: Policy, sharding: ZeroSharding) -> list[str]:
    """What is not, bit by bit and in kind, as a plain load has it; every parameter is gathered by itself."""
    expected = dict(plain.named_parameters())
    found = [] if sharded.facts == plain.facts else ["facts"]
    for name, parameter in sharded.named_parameters():
        own = expected.pop(name)
        if parameter.numel() or parameter.ds_tensor.numel() > -(-own.numel() // torch.distributed.get_world_size()):
            found.append(f"{name} is not sharded")
        with sharding.whole([parameter]):
            if parameter.dtype != own.dtype or not torch.equal(parameter, own):
                found.append(name)
    buffers = dict(sharded.named_buffers())
    for name, buffer in plain.named_buffers():
        own = buffers.pop(name)
        if own.dtype != buffer.dtype or not torch.equal(own, buffer):
            found.append(name)
    return [*found, *expected, *buffers]


def families(directory: Path) -> dict[str, Any]:
    sharding = ZeroSharding(configuration(directory / "qwen3_moe", "float32"), torch.device("cpu"))
    found: dict[str, Any] = {}
    for model in sorted(directory.iterdir()):
        for dtype in ("float32", "bfloat16"):
            config = configuration(model, dtype)
            critic = str(model) if model.name == "qwen3_moe" else None
            sharded, plain = (load(config, each, critic_path=critic) for each in (sharding, None))
            if isinstance(sharded, Policy) and isinstance(plain, Policy):
                if plain.critic is not None:
                    # DeepSpeed does this to a value head that is not sharded when it takes it.
                    plain.critic.value_head.to(next(plain.parameters()).dtype)
                found[f"{model.name} {dtype}"] = differences(sharded, plain, sharding)
            else:
                found[f"{model.name} {dtype}"] = [] if sharded == plain else [str(sharded), str(plain)]
    return found


def peak_bytes(work: Any) -> tuple[Any, int]:
    """What `work` returns, and by how much this process's memory exceeded its start at most."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = status("VmRSS")
    result = work()
    return result, status("VmHWM") - before


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def memory(directory: Path) -> dict[str, Any]:
    """A large sharded model, and in addition as the reference; the same reference unsharded, for comparison."""
    small, config = (configuration(directory / name, "float32") for name in ("families/qwen3_moe", "large"))
    sharding = ZeroSharding(small, torch.device("cpu"))
    # Libraries load and allocate what they need once.
    load(small, sharding)
    load(small, None)
    sharded, loading = peak_bytes(lambda: load(config, sharding))
    assert isinstance(sharded, Policy)

    def reference(by: ZeroSharding | None) -> Reference:
        return load_reference(ReferenceConfig(), config.model, device=torch.device("cpu"), sharding=by)

    cut_reference, reference_bytes = peak_bytes(lambda: reference(sharding))
    batch = pack(make_samples([(4, 5), (3, 4)], routing=None))
    logprobs, computing = peak_bytes(lambda: cut_reference.logprobs(batch, keep_routing=False))
    whole_reference, whole = peak_bytes(lambda: reference(None))
    gap = float((whole_reference.logprobs(batch, keep_routing=False) - logprobs).abs().max())
    return {"loading": loading, "reference": reference_bytes, "computing": computing, "whole": whole, "gap": gap}


def main(directory: Path) -> None:
    results = {"memory": memory(directory), "families": families(directory / "families")}
    rank = torch.distributed.get_rank()
    (directory / f"results-{rank}.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
