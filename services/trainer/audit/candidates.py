"""Checks of the candidate sets by themselves."""

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from services.trainer.batch.packing import PackedBatch, PackedCandidates
from services.trainer.batch.samples import TrainSample
from services.trainer.engine.protocol import LogProbEngine

# Each candidate is asked for over the whole set, so a set of c costs c². What is beyond this in a batch is left out.
PAIRS_PER_BATCH = 4_000_000


def sampled_inside(sample: TrainSample) -> int:
    """How many completion tokens are in the candidate set of their position; 0 where no sets were captured."""
    candidates = sample.replay.candidates
    if candidates is None:
        return 0
    sets = np.split(candidates.token_ids, np.cumsum(candidates.counts)[:-1])
    return sum(int(token in allowed) for token, allowed in zip(sample.token_ids, sets, strict=True))


def probability_sums(batch: PackedBatch, engine: LogProbEngine, *, keep_routing: bool) -> Float[Tensor, "chosen"]:
    """For positions of the batch, the sum over the candidate set of the trainer's probability of each candidate.

    Positions are drawn at random, always the same ones, as far as PAIRS_PER_BATCH allows. Empty without sets.
    """
    if batch.candidates is None:
        return torch.empty(0, dtype=torch.float64)
    counts = batch.candidates.counts
    chosen = _affordable(counts)
    if not len(chosen):
        return torch.empty(0, dtype=torch.float64)
    starts = counts.cumsum(0) - counts
    ids = batch.candidates.token_ids
    asked = torch.repeat_interleave(chosen, counts[chosen])
    expanded = replace(
        batch,
        predicting=batch.predicting[asked],
        targets=ids[_ranges(starts[chosen], counts[chosen])],
        sequence_ids=batch.sequence_ids[asked],
        rollout_logprobs=batch.rollout_logprobs[asked],
        temperatures=batch.temperatures[asked],
        candidates=PackedCandidates(counts[asked], ids[_ranges(starts[asked], counts[asked])]),
    )
    probabilities = engine.logprobs(expanded, keep_routing=keep_routing).logprobs.double().exp()
    sums = torch.zeros(len(counts), dtype=torch.float64, device=probabilities.device)
    return sums.index_add_(0, asked, probabilities)[chosen].cpu()


def _affordable(counts: Int[Tensor, "tokens"]) -> Int[Tensor, "chosen"]:
    order = torch.randperm(len(counts), generator=torch.Generator().manual_seed(0)).to(counts.device)
    pairs = counts[order].square()
    possible = (pairs > 0) & (pairs <= PAIRS_PER_BATCH)
    order, pairs = order[possible], pairs[possible]
    chosen: Tensor = order[pairs.cumsum(0) <= PAIRS_PER_BATCH].sort().values
    return chosen


def _ranges(starts: Int[Tensor, "rows"], sizes: Int[Tensor, "rows"]) -> Int[Tensor, "candidates"]:
    """start, start + 1, …, start + size − 1 of each row, one after the other."""
    offsets = starts - (sizes.cumsum(0) - sizes)
    return torch.repeat_interleave(offsets, sizes) + torch.arange(int(sizes.sum()), device=starts.device)
