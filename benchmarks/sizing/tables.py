"""The calculator's answers as Markdown."""

from collections.abc import Callable, Sequence

from benchmarks.sizing.case import Case, Cycle
from benchmarks.sizing.data_plane import (
    SampleBytes,
    broadcast_seconds,
    largest_checkpoint_every,
    longest_sample,
    routing_on_hosts,
)
from benchmarks.sizing.storage import WEIGHT_BYTES, checkpoint_bytes, recorded_step_bytes
from benchmarks.sizing.training import activation_bytes_per_token, host_memory_at_start

Row = tuple[str, Callable[[Case], str]]
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def size(count: float) -> str:
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.3g} {name}" if count < 999.5 * unit else f"{count / unit:.0f} {name}"
    return f"{count:.0f} B"


def seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"


def _parts(sample: SampleBytes) -> list[float]:
    return [each for each in (sample.entry, sample.candidates, sample.routing) if each]


def _longest_run(case: Case, *, blobs_in_redis: bool) -> str:
    steps = largest_checkpoint_every(case.plane, case.work, case.assumptions, blobs_in_redis=blobs_in_redis)
    return "none" if steps is None else str(steps)


def _blob_limit(case: Case) -> str:
    return f"{longest_sample(case.sample, case.work, case.max_blob_bytes) / 1000:.0f} k tokens"


def _usable(case: Case) -> float:
    return case.gpu.memory * case.assumptions.memory_share


def _ranks_per_node(case: Case) -> int:
    return min(case.setup.ranks, case.assumptions.gpus_per_node)


def _verdict(case: Case, needed: float) -> str:
    return "" if needed <= _usable(case) else ": does not fit"


def _keep_up(case: Case, cycle: Cycle) -> str:
    plan = cycle.rollouts
    if plan is None:
        return "none are fast enough"
    return f"{plan.replicas} × {case.replica.gpus} {case.gpu.name}; {plan.gpus} : {case.setup.ranks}"


def _pace(cycle: Cycle) -> str:
    return f"{cycle.rollouts.sequences}; {cycle.rollouts.tokens_per_second:.0f}" if cycle.rollouts else "–"


def _longest(case: Case) -> str:
    plan = case.nccl.rollouts
    return f"{case.work.longest} tokens, {seconds(plan.longest_sample)}" if plan else "–"


def _stand(cycle: Cycle) -> str:
    rollouts = seconds(cycle.sync.rollout) if cycle.rollouts else "–"
    return f"{seconds(cycle.sync.trainer)} / {rollouts}"


def _broadcast(case: Case) -> str:
    return seconds(broadcast_seconds(case.plane.order, case.assumptions))


def _states(case: Case) -> tuple[float, float]:
    stage = case.setup.zero_stage
    return checkpoint_bytes(case.model, stage), recorded_step_bytes(case.model, stage, case.plane.order)


def _kept(case: Case) -> str:
    checkpoints, versions, recordings = case.kept
    one, recorded = _states(case)
    weights = WEIGHT_BYTES * float(case.model.parameters)
    return f"{size(checkpoints * one)} + {size(versions * weights)} + {size(recordings * recorded)}"


MODEL: tuple[Row, ...] = (
    ("parameters, active", lambda c: f"{c.model.parameters / 1e9:.2f} G, {c.model.active_parameters / 1e9:.2f} G"),
    ("forward, a token of the mean length", lambda c: f"{c.model.forward_flops(c.work.length) / 1e9:.1f} GFLOP"),
    ("KV cache, a token", lambda c: size(c.model.kv_bytes_per_token)),
    ("routing, a forwarded token, raw", lambda c: size(c.model.routing_choices) if c.model.experts else "–"),
    (
        "activations, a token, with / without gradient checkpointing",
        lambda c: " / ".join(
            size(activation_bytes_per_token(c.model, gradient_checkpointing=each)) for each in (True, False)
        ),
    ),
)
DATA: tuple[Row, ...] = (
    ("samples × mean tokens of a step", lambda c: f"{c.work.samples} × {c.work.length}"),
    ("sample: entry + candidates + routing", lambda c: " + ".join(size(each) for each in _parts(c.sample))),
    ("replay bytes, a token", lambda c: f"{c.sample.blob / c.work.length:.0f} B"),
    ("step", lambda c: size(c.plane.order)),
    ("checkpoint_every; steps held", lambda c: f"{c.work.checkpoint_every}; {c.plane.steps_held}"),
    (
        "Redis memory, blobs in Redis / elsewhere",
        lambda c: " / ".join(size(c.plane.redis_memory(blobs_in_redis=each)) for each in (True, False)),
    ),
    (
        "Redis traffic, blobs in Redis / elsewhere",
        lambda c: " / ".join(
            f"{size(c.plane.redis_traffic(blobs_in_redis=each) / c.disk.seconds)}/s" for each in (True, False)
        ),
    ),
    ("order to all ranks, a step", lambda c: f"{size(c.plane.order)}, {_broadcast(c)}"),
    (
        "decoded routing on each trainer node",
        lambda c: size(routing_on_hosts(c.model, c.work, _ranks_per_node(c))) if c.model.experts else "–",
    ),
)
TRAINER: tuple[Row, ...] = (
    ("GPUs that train", lambda c: f"{c.setup.ranks} × {c.gpu.name}"),
    ("on each: state", lambda c: size(c.memory.state)),
    ("on each: gathered layer", lambda c: size(c.memory.gathered)),
    (
        "on each: reference",
        lambda c: f"{size(c.memory.reference)} ({c.setup.reference})" if c.memory.reference else "–",
    ),
    ("on each: activations", lambda c: size(c.memory.activations)),
    (
        "on each: sum / usable",
        lambda c: f"{size(c.memory.training)} / {size(_usable(c))}{_verdict(c, c.memory.training)}",
    ),
    ("on each at start: its part, a layer whole", lambda c: f"{size(c.memory.start)}{_verdict(c, c.memory.start)}"),
    ("host memory of a node at start", lambda c: size(host_memory_at_start(c.model, c.setup, c.assumptions))),
    ("step: compute / ZeRO traffic", lambda c: f"{seconds(c.step.compute)} / {seconds(c.step.traffic)}"),
)
ROLLOUT: tuple[Row, ...] = (
    ("new weights by disk: trainer / rollouts stand", lambda c: _stand(c.disk)),
    ("by disk: step, all in all", lambda c: seconds(c.disk.seconds)),
    ("by disk: rollouts that keep up; GPUs sample : train", lambda c: _keep_up(c, c.disk)),
    ("by disk: sequences at a time, tokens a second, each", lambda c: _pace(c.disk)),
    (
        "new weights by nccl: all stand; step, all in all",
        lambda c: f"{seconds(c.nccl.sync.trainer)}; {seconds(c.nccl.seconds)}",
    ),
    ("by nccl: rollouts that keep up; GPUs sample : train", lambda c: _keep_up(c, c.nccl)),
    ("by nccl: sequences at a time, tokens a second, each", lambda c: _pace(c.nccl)),
    ("a sample of max_tokens", _longest),
)
FILES: tuple[Row, ...] = (
    ("weights of a version", lambda c: size(WEIGHT_BYTES * float(c.model.parameters))),
    ("checkpoint / recorded step", lambda c: " / ".join(size(each) for each in _states(c))),
    ("kept: checkpoints + versions + recorded steps", _kept),
)
LIMITS: tuple[Row, ...] = (
    ("all blobs of a step through one Redis", lambda c: seconds(c.plane.blobs_per_step / c.assumptions.redis)),
    (
        "largest checkpoint_every, blobs in Redis / elsewhere",
        lambda c: " / ".join(_longest_run(c, blobs_in_redis=each) for each in (True, False)),
    ),
    ("sample whose blob reaches `blobs.max_bytes`", _blob_limit),
)
SECTIONS: tuple[tuple[str, tuple[Row, ...]], ...] = (
    ("model", MODEL),
    ("data plane", DATA),
    ("trainer", TRAINER),
    ("balance", ROLLOUT),
    ("files", FILES),
    ("limit", LIMITS),
)


def tables(cases: Sequence[Case]) -> str:
    """Raises ValueError where a rollout's GPUs do not hold the model."""
    return "\n".join(table(title, rows, cases) for title, rows in SECTIONS)


def table(title: str, rows: Sequence[Row], cases: Sequence[Case]) -> str:
    head = [title, *(case.model.name for case in cases)]
    body = [[label, *(cell(case) for case in cases)] for label, cell in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *body])
