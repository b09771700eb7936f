"""An engine in plain PyTorch on one rank: it computes log-probs and gradients, and never updates."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from services.common.config import Config
from services.common.errors import InvalidData
from services.trainer.batch.model_facts import ModelFacts
from services.trainer.batch.packing import PackedBatch
from services.trainer.engine.protocol import PolicyOutput, Reduction, StepResult
from services.trainer.model.policy import Policy


def plain_device(config: Config) -> torch.device:
    """Raises InvalidData where the device that the trainer is to use does not exist."""
    wanted, cuda = config.trainer.device, torch.cuda.is_available()
    if wanted == "cuda" and not cuda:
        raise InvalidData("device_missing", "trainer.device is cuda, but torch sees no CUDA device")
    return torch.device("cuda" if cuda and wanted != "cpu" else "cpu")


class PlainEngine:
    """An UpdateEngine whose steps keep the gradient and leave the policy as it is."""

    rank, world_size, sharding = 0, 1, None

    def __init__(self, policy: Policy, device: torch.device, steps_applied: int = 0) -> None:
        self.policy, self.device, self.steps_applied = policy.to(device), device, steps_applied
        self._gradient: Tensor | None = None

    @property
    def facts(self) -> ModelFacts:
        return self.policy.facts

    def take_gradient(self) -> Float[Tensor, "parameters"] | None:
        """Of the last step over all parameters of the model, on the CPU in float32; None where there was no step.

        Those of a value head or a critic are left out, so that algorithms with and without one can be compared.
        """
        gradient, self._gradient = self._gradient, None
        return gradient

    def logprobs(self, batch: PackedBatch, *, keep_routing: bool = True) -> PolicyOutput:
        with torch.no_grad():
            return self._output(batch, keep_routing=keep_routing)

    def forward(self, batch: PackedBatch, *, keep_routing: bool = True, entropy_gradient: bool = False) -> PolicyOutput:
        return self._output(batch, keep_routing=keep_routing, entropy_gradient=entropy_gradient)

    def _output(self, batch: PackedBatch, **options: bool) -> PolicyOutput:
        logprobs, entropies, *values = self.policy(batch, **options)
        return PolicyOutput(logprobs, entropies, self.policy.agreement, *values)

    def backward(self, loss: Float[Tensor, ""], *, last: bool) -> None:  # noqa: ARG002
        try:
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            self.policy.close_routing()

    def step(self) -> StepResult:
        """Keeps the gradient, clears it, and leaves the parameters as they are."""
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        norm = math.hypot(*(float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in gradients))
        self._gradient = torch.cat([_gradient(parameter) for parameter in self.policy.model.parameters()])
        self.policy.zero_grad(set_to_none=True)
        return StepResult(math.isfinite(norm), norm, 0.0)

    def all_reduce(self, values: Tensor, operation: Reduction) -> Tensor:  # noqa: ARG002
        return values.detach().clone()


def _gradient(parameter: Tensor) -> Float[Tensor, "parameters"]:
    if parameter.grad is None:
        return torch.zeros(parameter.numel())
    return parameter.grad.detach().float().flatten().cpu()
