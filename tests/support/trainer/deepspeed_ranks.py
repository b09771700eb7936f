"""Samples, a configuration and a step for tests of the DeepSpeed engine, and looks at its state."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from services.common.config import Config, parse_config
from services.trainer.batch.packing import pack, plan_microbatches
from services.trainer.batch.samples import TrainSample
from services.trainer.engine import zero_state
from services.trainer.engine.deepspeed_engine import DeepSpeedEngine
from services.trainer.engine.protocol import StepResult
from tests.support.trainer.model_families import make_samples

LENGTHS = [(4, 5), (1, 3), (6, 2), (2, 7), (3, 3)]
TOKEN_BUDGET = 12
ROUTING = (2, 8, 2)
LEARNING_RATE, WARMUP, MAX_GRAD_NORM, WEIGHT_DECAY = 1e-2, 2, 0.5, 0.1


def samples() -> list[TrainSample]:
    return make_samples(LENGTHS, routing=ROUTING, candidates=12)


def rewarded_samples() -> list[TrainSample]:
    """For PPO, which goes by the reward alone."""
    return [replace(sample, reward=(-1.0) ** index) for index, sample in enumerate(samples())]


def configuration(
    model: Path,
    stage: int,
    dtype: str,
    *,
    checkpointing: bool = False,
    algorithm: dict[str, Any] | None = None,
    keeps_small_whole: bool = False,
) -> Config:
    cuts_all = stage == 3 and not keeps_small_whole
    extra = {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if cuts_all else {}
    return parse_config(
        {
            "run": {"name": "engine-test"},
            "model": {"path": str(model), "dtype": dtype, "max_length": 16},
            "data": {"train": {"kind": "jsonl", "path": "none.jsonl"}, "max_prompt_tokens": 8},
            "sampling": {"max_tokens": 8, "top_k": 12},
            "reward": {"scorers": [{"name": "exact_match"}]},
            "algorithm": algorithm or {},
            "rl_stability": {"unbiased_kl": {"enabled": False}},
            "trainer": {
                "device": "cpu",
                "steps": 10,
                "zero_stage": stage,
                "tokens_per_microbatch": 16,
                "gradient_checkpointing": checkpointing,
                "optimizer": {
                    "learning_rate": LEARNING_RATE,
                    "warmup_steps": WARMUP,
                    "max_grad_norm": MAX_GRAD_NORM,
                    "weight_decay": WEIGHT_DECAY,
                },
                "deepspeed": extra,
            },
        }
    )


def train_step(engine: DeepSpeedEngine, *, poison: bool = False) -> StepResult:
    """A policy gradient over all samples; `poison` makes one loss of the last rank NaN."""
    everything = samples()
    plan = plan_microbatches([s.forward_length for s in everything], TOKEN_BUDGET, engine.world_size)[engine.rank]
    tokens = sum(len(sample.token_ids) for sample in everything)
    for position, micro in enumerate(plan):
        batch = pack([everything[index] for index in micro.indices])
        output = engine.forward(batch)
        loss = -(output.logprobs * batch.advantages[batch.sequence_ids]).sum() / tokens * float(micro.counts)
        if poison and engine.rank == engine.world_size - 1 and position == 0:
            loss = loss * float("nan")
        engine.backward(loss, last=position == len(plan) - 1)
    return engine.step()


def parameters(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    return engine._gather_state()


def write_state(engine: DeepSpeedEngine, path: Path) -> None:
    """This rank's part; the test puts the parts of all ranks together."""
    found = zero_state.fragments(engine._policy, engine._engine.optimizer)
    parts = {f"{part.parameter}|{part.state}|{part.start}": part.values.clone() for part in found}
    save_file(parts, f"{path}-{engine.rank}.safetensors")


def digest_follows_every_bit(engine: DeepSpeedEngine) -> bool:
    """A bit of a moment, flipped on the last rank only, changes the digest on all, and back."""
    before = engine.state_digest()
    *_, last = (
        part for part in zero_state.fragments(engine._policy, engine._engine.optimizer) if part.state == "exp_avg_sq"
    )
    words = last.values.view(torch.int32)
    mine = int(engine.rank == engine.world_size - 1)
    words[-1] ^= mine
    changed = engine.state_digest()
    words[-1] ^= mine
    return changed != before and engine.state_digest() == before


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def draws() -> list[float]:
    return [float(torch.rand(())), float(np.random.random()), random.random()]
