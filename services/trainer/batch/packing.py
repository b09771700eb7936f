"""Samples of unequal length side by side in one row, without padding and without seeing each other.

Position ids restart with each sample, and there is neither an attention mask nor a cache: that is what makes the
model treat the row as separate sequences. A sample's last token is predicted and never fed, so a packed row has exactly
the positions that the sampler forwarded, and routing has a row for each of them.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from services.common.errors import InvalidData
from services.common.wire.tensors import Array
from services.trainer.batch.samples import TrainSample


@dataclass(frozen=True)
class MicroBatch:
    """Indices of the samples that one forward takes.

    `counts` is False for a repeat that only keeps the ranks' collectives in step: its loss must be multiplied by zero.
    """

    indices: tuple[int, ...]
    counts: bool = True


def plan_microbatches(
    lengths: Sequence[int], token_budget: int, world_size: int, *, max_sequences: int | None = None
) -> list[list[MicroBatch]]:
    """For each rank its micro-batches: as many on each, every sample in exactly one that counts, tokens balanced.

    `lengths` are forward lengths. Longest first into the lightest bin (Graham 1969), with as few bins as the budget
    allows. The plan depends on nothing but the arguments. Raises InvalidData for no samples or one over the budget.
    """
    if not lengths:
        raise InvalidData("batch_empty", "there are no samples to plan, expected at least one")
    longest = max(range(len(lengths)), key=lambda index: lengths[index])
    if lengths[longest] > token_budget:
        raise InvalidData(
            "sample_over_budget", f"sample {longest} takes {lengths[longest]} tokens, expected at most {token_budget}"
        )
    limit = max_sequences or len(lengths)
    fewest_bins = max(-(-sum(lengths) // token_budget), -(-len(lengths) // limit))
    rounds = -(-fewest_bins // world_size)
    while (bins := _longest_first(lengths, token_budget, limit, rounds * world_size)) is None:
        rounds += 1
    return _deal(bins, lengths, world_size)


def _longest_first(lengths: Sequence[int], token_budget: int, limit: int, count: int) -> list[list[int]] | None:
    bins: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, index) for index in range(count)]
    for sample in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if not loads:
            return None
        load, index = heapq.heappop(loads)
        if load + lengths[sample] > token_budget:
            return None
        bins[index].append(sample)
        if len(bins[index]) < limit:
            heapq.heappush(loads, (load + lengths[sample], index))
    return bins


def _deal(bins: list[list[int]], lengths: Sequence[int], world_size: int) -> list[list[MicroBatch]]:
    """The k-th micro-batches of all ranks have about the same cost, and so do the ranks' totals."""
    ordered = sorted(bins, key=lambda samples: -sum(lengths[sample] for sample in samples))
    smallest = next(samples for samples in reversed(ordered) if samples)
    plan: list[list[MicroBatch]] = [[] for _ in range(world_size)]
    for turn in range(len(ordered) // world_size):
        dealt = ordered[turn * world_size : (turn + 1) * world_size]
        for rank, samples in enumerate(dealt if turn % 2 == 0 else reversed(dealt)):
            plan[rank].append(
                MicroBatch(tuple(sorted(samples))) if samples else MicroBatch(tuple(smallest), counts=False)
            )
    return plan


@dataclass(frozen=True)
class PackedCandidates:
    """Ragged candidate sets. A count of 0 stands for the whole vocabulary."""

    counts: Int[Tensor, "tokens"]
    token_ids: Int[Tensor, "candidates"]


@dataclass(frozen=True)
class PackedBatch:
    """Samples in one row of positions, some of which predict a completion token; `sequence_ids` count the samples."""

    sample_ids: tuple[str, ...]
    input_ids: Int[Tensor, "1 positions"]
    position_ids: Int[Tensor, "1 positions"]
    # Where in the row each completion token is predicted.
    predicting: Int[Tensor, "tokens"]
    targets: Int[Tensor, "tokens"]
    sequence_ids: Int[Tensor, "tokens"]
    rollout_logprobs: Float[Tensor, "tokens"]
    temperatures: Float[Tensor, "tokens"]
    advantages: Float[Tensor, "sequences"]
    truncated: Bool[Tensor, "sequences"]
    # None for a dense model.
    routing: Int[Tensor, "positions layers experts_per_token"] | None
    # None where the whole vocabulary was allowed everywhere.
    candidates: PackedCandidates | None

    @property
    def tokens(self) -> int:
        return int(self.targets.shape[0])

    @property
    def positions(self) -> int:
        return int(self.input_ids.shape[1])

    def without_candidates(self) -> "PackedBatch":
        """The same batch over the whole vocabulary (keep_sampling_mask off)."""
        return replace(self, candidates=None)

    def to(self, device: torch.device | str) -> "PackedBatch":
        moved: dict[str, object] = {
            name: value.to(device, non_blocking=True) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        if self.candidates is not None:
            moved["candidates"] = PackedCandidates(
                self.candidates.counts.to(device), self.candidates.token_ids.to(device)
            )
        return replace(self, **moved)  # type: ignore[arg-type]


def pack(samples: Sequence[TrainSample]) -> PackedBatch:
    """At least one sample; either all of them have routing, or none has."""
    lengths = [sample.forward_length for sample in samples]
    starts = np.cumsum([0, *lengths[:-1]])
    completions = [len(sample.token_ids) for sample in samples]
    rows = [np.concatenate([sample.prompt_token_ids, sample.token_ids])[:-1] for sample in samples]
    predicting = [
        start + length - completion + np.arange(completion)
        for start, length, completion in zip(starts, lengths, completions, strict=True)
    ]
    return PackedBatch(
        sample_ids=tuple(sample.sample_id for sample in samples),
        input_ids=_integers(np.concatenate(rows))[None],
        position_ids=_integers(np.concatenate([np.arange(length) for length in lengths]))[None],
        predicting=_integers(np.concatenate(predicting)),
        targets=_integers(np.concatenate([sample.token_ids for sample in samples])),
        sequence_ids=_integers(np.repeat(np.arange(len(samples)), completions)),
        rollout_logprobs=_floats(np.concatenate([sample.rollout_logprobs for sample in samples])),
        temperatures=_floats(np.repeat([sample.temperature for sample in samples], completions)),
        advantages=_floats(np.asarray([sample.advantage for sample in samples])),
        truncated=torch.tensor([sample.truncated for sample in samples]),
        routing=_pack_routing(samples),
        candidates=_pack_candidates(samples),
    )


def _pack_routing(samples: Sequence[TrainSample]) -> Tensor | None:
    captured = [sample.replay.routing for sample in samples]
    rows = [routing.astype(np.int32) for routing in captured if routing is not None]
    return torch.from_numpy(np.concatenate(rows)) if rows else None


def _pack_candidates(samples: Sequence[TrainSample]) -> PackedCandidates | None:
    captured = [sample.replay.candidates for sample in samples]
    token_ids = [candidates.token_ids for candidates in captured if candidates is not None]
    if not token_ids:
        return None
    counts = [
        np.zeros(len(sample.token_ids), np.int32) if candidates is None else candidates.counts
        for sample, candidates in zip(samples, captured, strict=True)
    ]
    return PackedCandidates(_integers(np.concatenate(counts)), _integers(np.concatenate(token_ids)))


def _integers(array: Array) -> Tensor:
    return torch.from_numpy(array.astype(np.int64))


def _floats(array: Array) -> Tensor:
    """Infinite where float32 does not hold the number: the step is skipped then."""
    with np.errstate(over="ignore"):
        return torch.from_numpy(array.astype(np.float32))
