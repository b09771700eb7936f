"""The comparison itself: samples and an engine in, numbers out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from services.common.run_files.audit_report import CandidateFacts, Mismatch, ReplayKind
from services.trainer.audit.candidates import probability_sums, sampled_inside
from services.trainer.batch.packing import PackedBatch, pack, plan_microbatches
from services.trainer.batch.samples import TrainSample
from services.trainer.engine.protocol import LogProbEngine
from services.trainer.objective.kl import k3

QUANTILES = (0.5, 0.9, 0.99)

Replayed = tuple[ReplayKind, ...]


@dataclass(frozen=True)
class Comparison:
    """A row for each combination of the kinds of replay that the samples hold, all of them first."""

    rows: tuple[Mismatch, ...]
    candidates: CandidateFacts | None


@dataclass(frozen=True)
class _Recomputed:
    logprobs: Float[Tensor, "tokens"]
    agreement: tuple[float, ...]


def compare(samples: Sequence[TrainSample], engine: LogProbEngine, *, tokens_per_microbatch: int) -> Comparison:
    """Raises InvalidData for samples that are not this model's, as packing and the policy do."""
    plans = plan_microbatches(
        [sample.forward_length for sample in samples],
        tokens_per_microbatch,
        world_size=1,
        max_sequences=None if engine.facts.packs else 1,
    )[0]
    batches = [pack([samples[index] for index in plan.indices]).to(engine.device) for plan in plans]
    recomputed = {replayed: _recompute(batches, engine, replayed) for replayed in _combinations(_kinds(batches))}
    rows = tuple(_mismatch(batches, replayed, result) for replayed, result in recomputed.items())
    return Comparison(rows, _candidates(samples, batches, engine, recomputed))


def _kinds(batches: Sequence[PackedBatch]) -> Replayed:
    kinds: list[ReplayKind] = []
    if any(batch.routing is not None for batch in batches):
        kinds.append("routing")
    if any(batch.candidates is not None for batch in batches):
        kinds.append("candidates")
    return tuple(kinds)


def _combinations(kinds: Replayed) -> list[Replayed]:
    chosen: list[Replayed] = [()]
    for kind in reversed(kinds):
        chosen = [(kind, *rest) for rest in chosen] + chosen
    return sorted(chosen, key=len, reverse=True)


def _recompute(batches: Sequence[PackedBatch], engine: LogProbEngine, replayed: Replayed) -> _Recomputed:
    logprobs, agreeing, compared = [], torch.zeros(engine.facts.moe_layers, dtype=torch.int64), 0
    for batch in batches:
        chosen = batch if "candidates" in replayed else batch.without_candidates()
        output = engine.logprobs(chosen, keep_routing="routing" in replayed)
        logprobs.append(output.logprobs.double().cpu())
        if output.agreement is not None:
            agreeing += torch.tensor(output.agreement.agreeing)
            compared += output.agreement.rows
    agreement = tuple((agreeing.double() / compared).tolist()) if compared else ()
    return _Recomputed(torch.cat(logprobs), agreement)


def _mismatch(batches: Sequence[PackedBatch], replayed: Replayed, result: _Recomputed) -> Mismatch:
    rollout = torch.cat([batch.rollout_logprobs.double().cpu() for batch in batches])
    gap = result.logprobs - rollout
    size = gap.abs()
    worst = int(size.argmax())
    sample, position = _locate(batches, worst)
    return Mismatch(
        replayed=replayed,
        difference_mean=size.mean().item(),
        difference_max=size[worst].item(),
        difference_quantiles={f"{level:g}": float(np.quantile(size.numpy(), level)) for level in QUANTILES},
        ratio_mean=gap.exp().mean().item(),
        mismatch_kl=k3(rollout, result.logprobs).mean().item(),
        worst_sample=sample,
        worst_position=position,
        agreement=result.agreement,
    )


def _locate(batches: Sequence[PackedBatch], token: int) -> tuple[str, int]:
    """Sample id of a token in the row of all batches' tokens, and its position in the completion."""
    for batch in batches:
        if token < batch.tokens:
            sequence = batch.sequence_ids[token]
            before = int((batch.sequence_ids[:token] == sequence).sum())
            return batch.sample_ids[int(sequence)], before
        token -= batch.tokens
    raise IndexError(f"token {token} is beyond the last one")


def _candidates(
    samples: Sequence[TrainSample],
    batches: Sequence[PackedBatch],
    engine: LogProbEngine,
    recomputed: dict[Replayed, _Recomputed],
) -> CandidateFacts | None:
    counts = [batch.candidates.counts.cpu() for batch in batches if batch.candidates is not None]
    if not counts:
        return None
    sizes = torch.cat(counts)
    sizes = sizes[sizes > 0]
    everything = max(recomputed, key=len)
    unrestricted: Replayed = tuple(kind for kind in everything if kind != "candidates")
    mass = (recomputed[unrestricted].logprobs - recomputed[everything].logprobs).exp()
    sums = torch.cat([probability_sums(batch, engine, keep_routing="routing" in everything) for batch in batches])
    return CandidateFacts(
        positions=len(sizes),
        inside=sum(sampled_inside(sample) for sample in samples),
        size_min=int(sizes.min()),
        size_mean=sizes.double().mean().item(),
        size_max=int(sizes.max()),
        summed_positions=len(sums),
        sum_error_max=(sums - 1).abs().max().item() if len(sums) else 0.0,
        mass_mean=mass.mean().item(),
        mass_min=mass.min().item(),
    )
