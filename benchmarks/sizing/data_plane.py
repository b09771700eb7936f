"""Bytes between rollout and trainer: a sample, a step, what Redis holds, what rank 0 sends to the other ranks."""

from dataclasses import dataclass

from benchmarks.sizing.architecture import Architecture
from benchmarks.sizing.assumptions import Assumptions, MeasuredBytes, Workload


@dataclass(frozen=True)
class SampleBytes:
    """`routing` and `candidates` make the blob; `entry` is the sample's share of its group's stream entry."""

    routing: float
    candidates: float
    entry: float

    @property
    def blob(self) -> float:
        return self.routing + self.candidates

    @property
    def total(self) -> float:
        return self.blob + self.entry


def sample_bytes(model: Architecture, work: Workload, measured: MeasuredBytes) -> SampleBytes:
    routing = 0.0
    if model.experts is not None:
        width = 2 if model.routing_dtype == "uint16" else 1
        share = measured.routing_share(model.experts.count)
        routing = model.routing_choices * width * share * (work.length - 1)
    candidates = 0.0
    if work.candidates:
        candidates = (measured.candidate_base + measured.candidate_id * work.candidates) * work.completion
    entry = measured.prompt_token * work.prompt / work.group_size + measured.completion_token * work.completion
    return SampleBytes(routing, candidates, entry)


@dataclass(frozen=True)
class DataPlane:
    """Of a run: bytes, and bytes of a step."""

    blobs_per_step: float
    entries_per_step: float
    # Steps whose groups wait for a checkpoint or are under way, at most.
    steps_held: int

    @property
    def order(self) -> float:
        """What rank 0 sends to every other rank for a step."""
        return self.blobs_per_step + self.entries_per_step

    def redis_memory(self, *, blobs_in_redis: bool) -> float:
        """An entry goes once a checkpoint holds its group, and its blobs with it."""
        return self.steps_held * (self.entries_per_step + self.blobs_per_step * blobs_in_redis)

    def redis_traffic(self, *, blobs_in_redis: bool) -> float:
        """In and out: an entry is written and read as a sample and as a scored group, a blob once."""
        return 4 * self.entries_per_step + 2 * self.blobs_per_step * blobs_in_redis


def data_plane(model: Architecture, work: Workload, measured: MeasuredBytes) -> DataPlane:
    """At most (v + 1 + max_staleness)·B groups are issued at version v, and a checkpoint is at most K steps old."""
    sample = sample_bytes(model, work, measured)
    return DataPlane(
        blobs_per_step=work.samples * sample.blob,
        entries_per_step=work.samples * sample.entry,
        steps_held=work.checkpoint_every + 1 + work.max_staleness,
    )


def largest_checkpoint_every(
    plane: DataPlane, work: Workload, assumptions: Assumptions, *, blobs_in_redis: bool
) -> int | None:
    """With which Redis holds all that waits; None where it cannot even hold what is under way and one step."""
    step = plane.entries_per_step + plane.blobs_per_step * blobs_in_redis
    steps = int(assumptions.redis_memory / step) - 1 - work.max_staleness
    return steps if steps > 0 else None


def longest_sample(sample: SampleBytes, work: Workload, max_bytes: int) -> int:
    """Tokens of the sample whose blob reaches `max_bytes`, at the mean bytes a token."""
    return int(max_bytes * work.length / sample.blob)


def broadcast_seconds(order: float, assumptions: Assumptions) -> float:
    """From the host to rank 0's GPU, through the ring to all GPUs, and from each GPU back to its host."""
    host = order / assumptions.host_copy * 2
    return host + order / assumptions.interconnect


def routing_on_hosts(model: Architecture, work: Workload, ranks: int) -> float:
    """Bytes of decoded routing on a node of so many ranks: each decodes every sample of the step."""
    width = 2 if model.routing_dtype == "uint16" else 1
    return ranks * work.samples * model.routing_choices * width * (work.length - 1.0)
