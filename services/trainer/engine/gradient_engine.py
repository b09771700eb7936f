"""A train engine that computes gradients and never updates: plain PyTorch on one rank."""

import math
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from services.trainer.batch.model_facts import ModelFacts
from services.trainer.batch.packing import PackedBatch
from services.trainer.engine.protocol import PolicyOutput, Reduction, StepResult
from services.trainer.export.tensors import WeightSource
from services.trainer.model.policy import Policy


class GradientEngine:
    """`steps_applied` is what the recorded step started with, and stays so."""

    rank, world_size, sharding = 0, 1, None

    def __init__(self, policy: Policy, device: torch.device, steps_applied: int) -> None:
        self._policy, self._device, self._steps_applied = policy.to(device), device, steps_applied
        self._gradient: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def facts(self) -> ModelFacts:
        return self._policy.facts

    @property
    def steps_applied(self) -> int:
        return self._steps_applied

    def take_gradient(self) -> Float[Tensor, "parameters"] | None:
        """Of the last step over all parameters of the model, on the CPU in float32; None where there was no step.

        Those of a value head or a critic are left out, so that algorithms with and without one can be compared.
        """
        gradient, self._gradient = self._gradient, None
        return gradient

    def logprobs(self, batch: PackedBatch, *, keep_routing: bool = True) -> PolicyOutput:
        with torch.no_grad():
            return self.forward(batch, keep_routing=keep_routing)

    def forward(self, batch: PackedBatch, *, keep_routing: bool = True, entropy_gradient: bool = False) -> PolicyOutput:
        logprobs, entropies, *values = self._policy(batch, keep_routing=keep_routing, entropy_gradient=entropy_gradient)
        return PolicyOutput(logprobs, entropies, self._policy.agreement, *values)

    def backward(self, loss: Float[Tensor, ""], *, last: bool) -> None:  # noqa: ARG002
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            self._policy.close_routing()

    def step(self) -> StepResult:
        """Keeps the gradient, clears it, and leaves the parameters as they are."""
        gradients = [p.grad for p in self._policy.parameters() if p.grad is not None]
        norm = math.hypot(*(float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in gradients))
        self._gradient = torch.cat([_gradient(parameter) for parameter in self._policy.model.parameters()])
        self._policy.zero_grad(set_to_none=True)
        return StepResult(math.isfinite(norm), norm, 0.0)

    def finite(self) -> bool:
        return all(bool(parameter.isfinite().all()) for parameter in self._policy.parameters())

    def save(self, directory: Path) -> None:
        raise NotImplementedError("nothing changes here that could be saved")

    def load(self, directory: Path) -> None:
        raise NotImplementedError("there is no optimizer here whose state could be loaded")

    def state_digest(self) -> str:
        raise NotImplementedError("there is no training state here")

    def export(self, directory: Path) -> None:
        raise NotImplementedError("nothing changes here that could be exported")

    def weight_source(self) -> WeightSource:
        return WeightSource(self._policy.model, None)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        if data is None:
            raise ValueError("the only rank passed nothing, expected data")
        return data

    def all_reduce(self, values: Tensor, operation: Reduction) -> Tensor:  # noqa: ARG002
        return values.detach().clone()

    def barrier(self) -> None:
        """The only rank waits for no other."""

    def close(self) -> None:
        """Holds nothing that must be released."""


def _gradient(parameter: Tensor) -> Float[Tensor, "parameters"]:
    if parameter.grad is None:
        return torch.zeros(parameter.numel())
    return parameter.grad.detach().float().flatten().cpu()
