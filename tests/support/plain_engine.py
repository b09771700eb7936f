"""A TrainEngine in plain PyTorch on one rank, so that what surrounds an engine is tested without one."""

from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from services.common.config import Config, parse_config
from services.trainer.batch.model_facts import ModelFacts
from services.trainer.batch.packing import PackedBatch
from services.trainer.engine.protocol import PolicyOutput, StepResult
from services.trainer.export.tensors import WeightSource
from services.trainer.model.policy import Policy


class PlainEngine:
    """Gradient descent at `rate`; counts its calls, and keeps the gradients of the last step."""

    rank, world_size, device, sharding = 0, 1, torch.device("cpu"), None

    def __init__(self, policy: Policy, rate: float = 0.0) -> None:
        self.policy, self._rate = policy, rate
        self.steps_applied = 0
        self.forwards = self.measurements = 0
        self.gradients: dict[str, Tensor] = {}

    @property
    def facts(self) -> ModelFacts:
        return self.policy.facts

    def logprobs(self, batch: PackedBatch, *, keep_routing: bool = True) -> PolicyOutput:
        self.measurements += 1
        with torch.no_grad():
            return self._output(batch, keep_routing, False)

    def forward(self, batch: PackedBatch, *, keep_routing: bool = True, entropy_gradient: bool = False) -> PolicyOutput:
        self.forwards += 1
        return self._output(batch, keep_routing, entropy_gradient)

    def _output(self, batch: PackedBatch, keep_routing: bool, entropy_gradient: bool) -> PolicyOutput:
        logprobs, entropies, *values = self.policy(batch, keep_routing=keep_routing, entropy_gradient=entropy_gradient)
        return PolicyOutput(logprobs, entropies, self.policy.agreement, *values)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()
        self.policy.close_routing()

    def step(self) -> StepResult:
        moved = {name: p for name, p in self.policy.named_parameters() if p.grad is not None}
        self.gradients = {name: p.grad.clone() for name, p in moved.items() if p.grad is not None}
        norm = torch.stack([gradient.square().sum() for gradient in self.gradients.values()]).sum().sqrt()
        applied = bool(norm.isfinite())
        if applied:
            with torch.no_grad():
                for name, parameter in moved.items():
                    parameter.sub_(self._rate * self.gradients[name])
        self.policy.zero_grad()
        self.steps_applied += applied
        return StepResult(applied, float(norm), self._rate)

    def finite(self) -> bool:
        return all(bool(parameter.isfinite().all()) for parameter in self.policy.parameters())

    def save(self, directory: Path) -> None:
        raise AssertionError("nothing here saves")

    def load(self, directory: Path) -> None:
        raise AssertionError("nothing here loads")

    def state_digest(self) -> str:
        hasher = xxhash.xxh3_128(self.steps_applied.to_bytes(8, "little"))
        for parameter in self.policy.parameters():
            hasher.update(parameter.detach().flatten().view(torch.uint8).numpy())
        return hasher.hexdigest()

    def export(self, directory: Path) -> None:
        raise AssertionError("nothing here exports")

    def weight_source(self) -> WeightSource:
        return WeightSource(self.policy.model, None)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        assert data is not None
        return data

    def all_reduce(self, values: Tensor, operation: str) -> Tensor:
        return values.clone()

    def barrier(self) -> None: ...

    def close(self) -> None: ...


def update_configuration(**sections: Any) -> Config:
    """Of the quickstart's kind, with everything that would correct the ratio off."""
    plain = {
        "run": {"name": "update"},
        "model": {"path": "models/none", "dtype": "float32", "max_length": 16},
        "data": {"train": {"kind": "jsonl", "path": "none.jsonl"}, "max_prompt_tokens": 8},
        "sampling": {"max_tokens": 8},
        "reward": {"scorers": [{"name": "exact_match"}]},
        "rl_stability": {
            "unbiased_kl": {"enabled": False},
            "sequence_masking": {"enabled": False},
            "importance_sampling": {"mode": "none"},
        },
        "trainer": {"tokens_per_microbatch": 64},
    }
    for name, section in sections.items():
        plain[name] = {**plain.get(name, {}), **section}
    return parse_config(plain)
