"""What ranks_worker does for test_deepspeed_engine, on one rank and on two.

Goes through ZeRO stages and precisions; rank 0 writes what it saw to DIRECTORY/results-<world size>.json and the
parameters to safetensors next to it. Each number of ranks then resumes what the other has saved.
"""

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from services.common.errors import InvalidData
from services.trainer.batch.packing import PackedBatch, pack
from services.trainer.engine import zero_state
from services.trainer.engine.deepspeed_engine import DeepSpeedEngine, open_engine
from services.trainer.engine.protocol import PolicyOutput
from services.trainer.update.policy_update import PolicyUpdater
from tests.support.trainer.deepspeed_ranks import (
    LEARNING_RATE,
    configuration,
    digest_follows_every_bit,
    draws,
    equal,
    parameters,
    rewarded_samples,
    samples,
    train_step,
    write_state,
)


def go_through(directory: Path, stage: int, dtype: str) -> dict[str, Any]:
    model = directory / "model"
    config = configuration(model, stage, dtype, checkpointing=stage != 1)
    engine = open_engine(config)
    name = f"{engine.world_size}-{stage}-{dtype}"
    start = parameters(engine)
    before = engine.logprobs(pack(samples()[:2]))
    steps = [train_step(engine) for _ in range(2)]
    trained = parameters(engine)
    skipped = train_step(engine, poison=True)
    unchanged = equal(trained, parameters(engine))
    checkpoint = directory / f"checkpoint-{name}"
    engine.save(checkpoint)
    digests = [engine.state_digest()]
    write_state(engine, directory / f"state-{checkpoint.name}")
    drawn = draws()
    straight = [train_step(engine)]
    digests.append(engine.state_digest())
    write_state(engine, directory / f"next-{checkpoint.name}")
    straight_parameters = parameters(engine)
    engine.export(directory / f"export-{name}")
    after = engine.logprobs(pack(samples()[:2]))
    dtypes = {str(value.dtype) for key, value in engine._policy.named_buffers() if "inv_freq" in key}
    sharded = any(parameter.numel() == 0 for parameter in engine._policy.parameters())
    engine.close()

    resumed = open_engine(config)
    draws()
    resumed.load(checkpoint)
    same_draws = draws() == drawn
    resumed_digests = [resumed.state_digest()]
    again = [train_step(resumed)]
    resumed_digests.append(resumed.state_digest())
    resumed_parameters = parameters(resumed)
    exact_digest = digest_follows_every_bit(resumed)
    resumed.close()
    if torch.distributed.get_rank() == 0:
        save_file(trained, directory / f"trained-{name}.safetensors")
    return {
        "applied": [step.applied for step in steps],
        "grad_norms": [step.grad_norm for step in steps],
        "learning_rates": [step.learning_rate for step in [*steps, skipped, *straight]],
        "next": {"grad_norm": straight[0].grad_norm, "lr": straight[0].learning_rate},
        "agreement": [before.agreement.rows, *before.agreement.agreeing] if before.agreement else None,
        "moved": not start or not equal(start, trained),
        "skip_applied": skipped.applied,
        "skip_norm_finite": bool(np.isfinite(skipped.grad_norm)),
        "skip_unchanged": unchanged,
        "resume_equal": equal(straight_parameters, resumed_parameters) and straight == again,
        "random_state_restored": same_draws,
        "drawn": drawn,
        "digests": digests,
        "digests_resumed": resumed_digests == digests and len({*digests}) == 2 and exact_digest,
        "exported_logprobs": after.logprobs.tolist(),
        "rotary_dtypes": sorted(dtypes),
        "sharded": sharded,
    }


PPO = {"name": "ppo", "entropy_coef": 0.01}


def train_ppo(directory: Path, stage: int, dtype: str) -> dict[str, Any]:
    """Two updates, and a third both straight on and after a resume."""
    config = configuration(directory / "model", stage, dtype, checkpointing=stage != 1, algorithm=PPO)
    batch = pack(rewarded_samples()[:2])

    def update(engine: DeepSpeedEngine) -> dict[str, float]:
        return PolicyUpdater(config, engine, None).train(rewarded_samples())

    engine = open_engine(config)
    name = f"ppo-{engine.world_size}-{stage}-{dtype}"
    start = engine.logprobs(batch).values
    steps = [update(engine) for _ in range(2)]
    engine.save(directory / name)
    write_state(engine, directory / f"state-{name}")
    straight = [update(engine)]
    write_state(engine, directory / f"next-{name}")
    after = engine.logprobs(batch)
    engine.export(directory / f"export-{name}")
    engine.close()
    resumed = open_engine(config)
    resumed.load(directory / name)
    again = [update(resumed)]
    values = resumed.logprobs(batch).values
    without_head = refusal(resumed, directory / f"checkpoint-{resumed.world_size}-{stage}-{dtype}")
    resumed.close()
    assert start is not None
    assert after.values is not None
    assert values is not None
    return {
        "start": start.tolist(),
        "steps": steps,
        "values": after.values.tolist(),
        "exported_logprobs": after.logprobs.tolist(),
        "next": straight[0],
        "resume_equal": straight == again and torch.equal(after.values, values),
        "without_head": without_head,
    }


class NotFinite:
    """The engine with one number of one sample NaN, where this rank has that sample and is the last one."""

    def __init__(self, engine: DeepSpeedEngine, field: str, *, gradient: bool) -> None:
        self._engine, self._field, self._gradient = engine, field, gradient

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def logprobs(self, batch: PackedBatch, **options: Any) -> PolicyOutput:
        return self._spoil(self._engine.logprobs(batch, **options), batch, False)

    def forward(self, batch: PackedBatch, **options: Any) -> PolicyOutput:
        return self._spoil(self._engine.forward(batch, **options), batch, True)

    def _spoil(self, output: PolicyOutput, batch: PackedBatch, gradient: bool) -> PolicyOutput:
        if gradient is not self._gradient or self.rank != self.world_size - 1:
            return output
        values = getattr(output, self._field)
        return replace(output, **{self._field: values.where(batch.sequence_ids != 0, float("nan"))})


def skip_not_finite(directory: Path, stage: int, dtype: str) -> dict[str, Any]:
    """PPO over several micro-batches a rank, with a NaN in one place after the other on the last rank alone."""
    config = configuration(directory / "model", stage, dtype, algorithm=PPO)
    engine = open_engine(config)
    start = engine.state_digest()
    reported = {}
    for field, gradient in [("logprobs", False), ("values", False), ("logprobs", True), ("values", True)]:
        updater = PolicyUpdater(config, NotFinite(engine, field, gradient=gradient), None)  # type: ignore[arg-type]
        values = updater.train(rewarded_samples())
        (skipped,) = updater.skipped
        reported[f"{field}-{gradient}"] = {
            "applied": values["step_applied"],
            "reason": skipped.reason,
            "samples": list(skipped.samples),
            "unchanged": engine.state_digest() == start and engine.finite(),
        }
    updater = PolicyUpdater(config, engine, None)
    applied = [updater.train(rewarded_samples())["step_applied"] for _ in range(2)]
    finite = [engine.finite()]
    found = next(zero_state.fragments(engine._policy, engine._engine.optimizer)).values
    if engine.rank == engine.world_size - 1:
        found[-1] = float("inf")
    finite.append(engine.finite())
    engine.close()
    everywhere = torch.tensor([float(finite == [True, False]), float(len(reported) == 4)])
    torch.distributed.all_reduce(everywhere, op=torch.distributed.ReduceOp.MIN)
    return {"reported": reported, "applied": applied, "finite_on_every_rank": everywhere.tolist()}


CRITIC = {**PPO, "critic": "separate", "critic_learning_rate": 3 * LEARNING_RATE}


def train_critic(directory: Path) -> dict[str, Any]:
    """ZeRO-3: two updates, and a third both straight on and after a resume."""
    config = configuration(directory / "model", 3, "float32", algorithm=CRITIC)

    def update(engine: DeepSpeedEngine) -> dict[str, float]:
        return PolicyUpdater(config, engine, None).train(rewarded_samples())

    engine = open_engine(config)
    name = f"critic-{engine.world_size}"
    steps = [update(engine) for _ in range(2)]
    engine.save(directory / name)
    straight = update(engine)
    engine.export(directory / f"export-{name}")
    engine.close()
    resumed = open_engine(config)
    resumed.load(directory / name)
    again = update(resumed)
    rates = sorted({group["lr"] for group in resumed._optimizer.param_groups})
    shared = refusal(resumed, directory / f"ppo-{resumed.world_size}-3-float32")
    resumed.close()
    return {"steps": steps, "resume_equal": straight == again, "rates": rates, "shared": shared}


def resume_recut(directory: Path, name: str, stage: int, dtype: str) -> dict[str, Any]:
    """Takes up what another number of ranks saved, and steps on."""
    algorithm = PPO if name.startswith("ppo") else None
    config = configuration(
        directory / "model",
        stage,
        dtype,
        checkpointing=stage != 1,
        algorithm=algorithm,
        keeps_small_whole=(stage, dtype) == (3, "float32"),
    )
    engine = open_engine(config)
    engine.load(directory / name)
    write_state(engine, directory / f"recut-state-{name}")
    drawn = draws()
    steps_applied = engine.steps_applied
    if algorithm:
        went = PolicyUpdater(config, engine, None).train(rewarded_samples())
    else:
        step = train_step(engine)
        went = {"grad_norm": step.grad_norm, "lr": step.learning_rate}
    write_state(engine, directory / f"recut-next-{name}")
    engine.close()
    everyone = torch.zeros(torch.distributed.get_world_size(), len(drawn), dtype=torch.float64)
    everyone[torch.distributed.get_rank()] = torch.tensor(drawn, dtype=torch.float64)
    torch.distributed.all_reduce(everyone)
    return {"steps_applied": steps_applied, "next": went, "drawn_by_rank": everyone.tolist()}


def refusals(directory: Path, first: DeepSpeedEngine) -> dict[str, str]:
    """What loading into another engine says, by what is different."""
    if first.world_size > 1:
        return {"zero_stage": refusal(first, directory / "checkpoint-2-3-float32")}
    made_alone = directory / "checkpoint-1-1-float32"
    said = {"missing": refusal(first, directory / "missing")}
    other = open_engine(configuration(directory / "other", 1, "float32"))
    said["parameters"] = refusal(other, made_alone)
    said["value_head"] = refusal(first, directory / "ppo-1-1-float32")
    said["dtype"] = refusal(first, directory / "checkpoint-1-3-bfloat16")
    other.close()
    (shard,) = (made_alone / "deepspeed").glob("*optim_states.pt")
    content = shard.read_bytes()
    middle = len(content) // 2
    for damage, damaged in {
        "cut_short": content[:middle],
        "overwritten": content[:middle] + b"\x55" * 64 + content[middle + 64 :],
        "gone": None,
    }.items():
        copy = shutil.copytree(made_alone, directory / f"damaged-{damage}")
        target = copy / "deepspeed" / shard.name
        target.unlink() if damaged is None else target.write_bytes(damaged)
        said[damage] = refusal(first, copy)
    return said


def refusal(engine: DeepSpeedEngine, checkpoint: Path) -> str:
    try:
        engine.load(checkpoint)
    except InvalidData as refused:
        return f"{refused.code}: {refused}"
    return "loaded"


def collectives(engine: DeepSpeedEngine) -> dict[str, Any]:
    rank = engine.rank
    data = bytes(range(256)) * 3
    received = engine.broadcast_bytes(data if rank == 0 else None) == data
    empty = engine.broadcast_bytes(b"" if rank == 0 else None) == b""
    values = torch.tensor([1.5, rank], dtype=torch.float64)
    sums = {operation: engine.all_reduce(values, operation).tolist() for operation in ("sum", "min", "max")}
    kept = values.tolist() == [1.5, rank]
    try:
        engine.broadcast_bytes(None if rank == 0 else b"x")
        one_sided = "accepted"
    except ValueError as refused:
        one_sided = str(refused)
    return {"broadcast": received and empty, "reduced": sums, "input_kept": kept, "one_sided": one_sided}


WAIT_SECONDS = 300.0

CASES = {
    1: [(1, "float32"), (3, "bfloat16")],
    2: [(1, "float32"), (2, "float32"), (3, "float32")],
}


NOT_FINITE_CASES = {1: [(1, "float32")], 2: [(2, "float32"), (3, "float32")]}
PPO_CASES = {1: [(1, "float32"), (3, "bfloat16")], 2: [(2, "float32"), (3, "float32")]}

# By the number of ranks that resume: what the other number saved, and the stage to resume in.
RECUT = {
    1: [("ppo-2-2-float32", 1, "float32"), ("checkpoint-2-3-float32", 3, "float32")],
    2: [("checkpoint-1-3-bfloat16", 3, "bfloat16")],
}


def main(directory: Path) -> None:
    # Stays open over all other engines.
    first = open_engine(configuration(directory / "model", 1, "float32"))
    world_size, other = first.world_size, 3 - first.world_size
    cases = {f"{stage}-{dtype}": go_through(directory, stage, dtype) for stage, dtype in CASES[world_size]}
    ppo = {f"{stage}-{dtype}": train_ppo(directory, stage, dtype) for stage, dtype in PPO_CASES[world_size]}
    not_finite = {
        f"{stage}-{dtype}": skip_not_finite(directory, stage, dtype) for stage, dtype in NOT_FINITE_CASES[world_size]
    }
    good = [
        float(case["resume_equal"] and case["skip_unchanged"] and case["digests_resumed"]) for case in cases.values()
    ]
    results = {
        "cases": cases,
        "ppo": ppo,
        "not_finite": not_finite,
        "critic": train_critic(directory) if world_size == 2 else {},
        "refusals": refusals(directory, first),
        "collectives": collectives(first),
        "good_on_every_rank": first.all_reduce(torch.tensor(good), "min").tolist(),
    }
    write_results(first, directory / f"results-{world_size}.json", results)
    wait_for(directory / f"results-{other}.json")
    write_results(first, directory / f"recut-{world_size}.json", recut(directory, world_size))
    first.close()


def wait_for(path: Path) -> None:
    """What the other number of ranks writes once its checkpoints are there."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {path} within {WAIT_SECONDS:g} s")
        time.sleep(0.1)


def recut(directory: Path, world_size: int) -> dict[str, Any]:
    return {name: resume_recut(directory, name, stage, dtype) for name, stage, dtype in RECUT[world_size]}


def write_results(first: DeepSpeedEngine, path: Path, results: dict[str, Any]) -> None:
    if first.rank == 0:
        written = path.with_suffix(".written")
        written.write_text(json.dumps(results, indent=1), encoding="utf-8")
        written.rename(path)
    first.barrier()
