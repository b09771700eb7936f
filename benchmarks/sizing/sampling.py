"""Rollouts on paper: sequences at a time, tokens a second, and how many rollouts keep up with the trainer."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.sizing.architecture import Architecture, GroupedAttention
from benchmarks.sizing.assumptions import Assumptions, Gpu, Workload

MOST_REPLICAS = 4096


@dataclass(frozen=True)
class Replica:
    """One vLLM engine: `gpus` share it by tensor parallelism, weights in bf16."""

    gpus: int


def cache_tokens(model: Architecture, replica: Replica, gpu: Gpu, assumptions: Assumptions) -> int:
    """Tokens that the KV cache holds; 0 where the weights do not fit.

    Tensor parallelism splits the cache by heads: a model with fewer KV heads than GPUs, or one latent for all heads,
    has it several times.
    """
    free = gpu.memory * assumptions.memory_share - 2.0 * model.parameters / replica.gpus
    return max(0, int(free / (model.kv_bytes_per_token / _cache_parts(model, replica))))


def _cache_parts(model: Architecture, replica: Replica) -> int:
    return min(replica.gpus, model.attention.kv_heads) if isinstance(model.attention, GroupedAttention) else 1


def most_sequences(model: Architecture, work: Workload, replica: Replica, gpu: Gpu, assumptions: Assumptions) -> int:
    """At the mean context of a sequence that is being sampled: P + C / 2."""
    return int(cache_tokens(model, replica, gpu, assumptions) / (work.prompt + work.completion / 2))


def weights_read(model: Architecture, sequences: int) -> float:
    """Bytes of one decoding step: of the experts, those that some sequence goes to, 1 − (1 − K/E)^sequences."""
    experts = 0
    touched = 1.0
    if model.experts is not None:
        experts = model.moe_layers * model.experts.count * 3 * model.hidden * model.experts.size
        touched = 1 - (1 - model.experts.per_token / model.experts.count) ** sequences
    # The embedding is a look-up.
    rest = model.parameters - experts - model.vocabulary * model.hidden
    return 2.0 * (rest + experts * touched)


def decode_seconds(
    model: Architecture, work: Workload, replica: Replica, sequences: int, gpu: Gpu, assumptions: Assumptions
) -> float:
    """For one token of each sequence: what has to be read, or what has to be computed, whichever takes longer."""
    context = work.prompt + work.completion / 2
    cache = sequences * context * model.kv_bytes_per_token / _cache_parts(model, replica)
    reading = (weights_read(model, sequences) / replica.gpus + cache) / (gpu.bandwidth * assumptions.bandwidth_share)
    # At position n attention sees n tokens, where forward_flops counts half of its length.
    flops = model.forward_flops(round(2 * context)) + 2.0 * model.vocabulary * model.hidden
    computing = sequences * flops / (replica.gpus * gpu.flops * assumptions.sampling_mfu)
    return max(reading, computing)


@dataclass(frozen=True)
class RolloutPlan:
    """`sequences` at a time and `tokens_per_second` are of one replica; `longest_sample` is in seconds."""

    replicas: int
    gpus: int
    sequences: int
    tokens_per_second: float
    step_seconds: float
    longest_sample: float


def rollouts_for(
    model: Architecture,
    work: Workload,
    replica: Replica,
    gpu: Gpu,
    assumptions: Assumptions,
    *,
    step_seconds: float,
    stall: Callable[[int], float],
) -> RolloutPlan | None:
    """The fewest replicas that sample a step's completions in `step_seconds`, of which `stall(replicas)` go to loading.

    While the trainer works on one batch, max_staleness batches are being sampled: replicas share their sequences. None
    where no number is fast enough: a completion's tokens follow each other, and loading may take ever longer. Raises
    ValueError where the weights do not fit, or nothing is sampled meanwhile.
    """
    limit = most_sequences(model, work, replica, gpu, assumptions)
    under_way = work.max_staleness * work.samples
    if limit < 1:
        raise ValueError(f"{replica.gpus} × {gpu.name} do not hold {model.name} and one sequence of {work.length}")
    if under_way < 1:
        raise ValueError("max_staleness is 0, expected at least 1: sampling and training take turns otherwise")
    for replicas in range(1, min(MOST_REPLICAS, under_way) + 1):
        sequences = min(limit, math.ceil(under_way / replicas))
        token = decode_seconds(model, work, replica, sequences, gpu, assumptions)
        needed = work.samples * work.completion * token / min(replicas * sequences, under_way)
        if needed + stall(replicas) <= step_seconds:
            return RolloutPlan(
                replicas, replicas * replica.gpus, sequences, sequences / token, needed, work.longest * token
            )
    return None
