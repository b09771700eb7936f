"""Sampler against trainer before a step."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from services.trainer.batch.packing import MicroBatch, PackedBatch
from services.trainer.engine.protocol import PolicyOutput, UpdateEngine
from services.trainer.metrics.step_metrics import StepMetrics


@dataclass(frozen=True)
class Measured:
    """A micro-batch under the policy, and under a reference where it is needed."""

    plan: MicroBatch
    batch: PackedBatch
    output: PolicyOutput
    reference_logprobs: Float[Tensor, "tokens"] | None


@dataclass(frozen=True, eq=False)
class SamplerComparison:
    """Sums and the largest gap over the tokens of an optimizer step, of all ranks. Two of them add up."""

    sums: Float[Tensor, "7"]
    largest: float

    def __add__(self, other: "SamplerComparison") -> "SamplerComparison":
        return SamplerComparison(self.sums + other.sums, max(self.largest, other.largest))

    def values(self) -> StepMetrics:
        gaps, ratios, entropies, tokens, agreeing, compared, candidates = self.sums.tolist()
        metrics = {
            "logprob_difference_mean": gaps / tokens,
            "logprob_difference_max": self.largest,
            "sampler_ratio_mean": ratios / tokens,
            "entropy": entropies / tokens,
        }
        if compared:
            metrics["routing_agreement"] = agreeing / compared
        if candidates:
            metrics["candidate_set_size"] = candidates / tokens
        return metrics


def compare_with_sampler(measured: Sequence[Measured], engine: UpdateEngine) -> SamplerComparison:
    """Sampler against trainer before the step. Collective."""
    sums = torch.zeros(7, dtype=torch.float64)
    largest = torch.zeros(1, dtype=torch.float64)
    for micro in measured:
        if not micro.plan.counts:
            continue
        gap = (micro.output.logprobs - micro.batch.rollout_logprobs).double()
        agreement = micro.output.agreement
        compared = agreement.rows * len(agreement.agreeing) if agreement else 0
        sums += torch.tensor(
            [
                gap.abs().sum(),
                gap.exp().sum(),
                micro.output.entropies.double().sum(),
                gap.numel(),
                sum(agreement.agreeing) if agreement else 0,
                compared,
                micro.batch.candidates.counts.sum() if micro.batch.candidates is not None else 0,
            ],
            dtype=torch.float64,
        )
        largest = torch.maximum(largest, gap.abs().max().cpu())
    return SamplerComparison(engine.all_reduce(sums, "sum"), engine.all_reduce(largest, "max").item())
