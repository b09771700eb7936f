"""The services' plain engine with an optimizer, so that what surrounds a train engine is tested without DeepSpeed."""

from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from services.common.config import Config, parse_config
from services.trainer.batch.packing import PackedBatch
from services.trainer.engine.plain_engine import PlainEngine
from services.trainer.engine.protocol import PolicyOutput, StepResult
from services.trainer.export.tensors import WeightSource
from services.trainer.model.policy import Policy


class DescentEngine(PlainEngine):
    """A TrainEngine: gradient descent at `rate`. Counts its calls, and keeps the gradients of the last step."""

    def __init__(self, policy: Policy, rate: float = 0.0) -> None:
        super().__init__(policy, torch.device("cpu"))
        self._rate = rate
        self.forwards = self.measurements = 0
        self.gradients: dict[str, Tensor] = {}

    def logprobs(self, batch: PackedBatch, *, keep_routing: bool = True) -> PolicyOutput:
        self.measurements += 1
        return super().logprobs(batch, keep_routing=keep_routing)

    def forward(self, batch: PackedBatch, *, keep_routing: bool = True, entropy_gradient: bool = False) -> PolicyOutput:
        self.forwards += 1
        return super().forward(batch, keep_routing=keep_routing, entropy_gradient=entropy_gradient)

    def step(self) -> StepResult:
        parameters = dict(self.policy.named_parameters())
        self.gradients = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        result = super().step()
        if result.applied:
            with torch.no_grad():
                for name, gradient in self.gradients.items():
                    parameters[name].sub_(self._rate * gradient)
        self.steps_applied += result.applied
        return StepResult(result.applied, result.grad_norm, self._rate)

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
