"""Bytes of real messages: what one sample of a given shape takes in Redis, in the blob store and in a step's order.

    python -m benchmarks.measure_bytes                        made-up samples of three models
    python -m benchmarks.measure_bytes --recorded RUN         the recorded steps of a run
    python -m benchmarks.measure_bytes --checkpoints MODEL    real ZeRO checkpoints of a small model, after one step

Samples are encoded by the code that services use. What a router chose and what a candidate set holds is drawn from a
stated distribution: no large model ran here.
"""

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import zstandard
from jaxtyping import Int32, UInt
from trivet.v1 import sample_pb2, step_pb2, tensor_pb2

from benchmarks.sizing.architecture import MODELS, Architecture
from services.common.run_files.recorded_steps import recorded_steps
from services.common.wire.replay_data import CandidateSets, Replay, encode_replay
from services.common.wire.tensors import Array, encode_tensor

Choice = Literal["uniform", "popular", "token-bound"]
CHOICES: tuple[Choice, ...] = ("uniform", "popular", "token-bound")
LENGTHS = (1024, 8192, 32_768)
PROMPT = 512
# Of an English text under a vocabulary of 130 to 150 thousand.
CHARACTERS_PER_TOKEN = 4
# How much more a token's own preference counts than chance does, where the choice is token-bound.
TOKEN_WEIGHT = 3.0


def draw_tokens(count: int, vocabulary: int, generator: np.random.Generator) -> Int32[Array, "positions"]:
    """Ids whose frequency falls as 1 / rank, as words' do (Zipf); ranks are shuffled over the vocabulary."""
    popularity = 1.0 / np.arange(1, vocabulary + 1)
    ranks = np.searchsorted(np.cumsum(popularity / popularity.sum()), generator.random(count))
    shuffled = generator.permutation(vocabulary).astype(np.int32)
    drawn: Array = shuffled[np.minimum(ranks, vocabulary - 1)]
    return drawn


def draw_routing(
    model: Architecture, token_ids: Int32[Array, "positions"], choice: Choice, generator: np.random.Generator
) -> UInt[Array, "positions layers experts_per_token"] | None:
    """Top-k of random scores, best first; None for a dense model.

    uniform: every expert is as likely. popular: an expert's odds fall as 1 / rank, ranks differ from layer to layer.
    token-bound: a token id has preferences of its own in each layer, and chance has less to say.
    """
    if model.experts is None:
        return None
    count, per_token = model.experts.count, model.experts.per_token
    shape = (len(token_ids), count)
    rows = np.empty((len(token_ids), model.moe_layers, per_token), dtype=model.routing_dtype)
    seen, row_of = np.unique(token_ids, return_inverse=True)
    for layer in range(model.moe_layers):
        scores = _gumbel(shape, generator)
        if choice == "popular":
            scores -= np.log(1 + generator.permutation(count)).astype(np.float32)
        elif choice == "token-bound":
            scores += TOKEN_WEIGHT * _gumbel((len(seen), count), generator)[row_of]
        best = np.argpartition(-scores, per_token - 1, axis=1)[:, :per_token]
        order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1)
        rows[:, layer] = np.take_along_axis(best, order, axis=1)
    return rows


def _gumbel(shape: tuple[int, ...], generator: np.random.Generator) -> Array:
    exponential = np.maximum(generator.standard_exponential(shape, dtype=np.float32), np.float32(1e-30))
    drawn: Array = -np.log(exponential)
    return drawn


def draw_candidates(
    token_ids: Int32[Array, "completion"], mean: float, limit: int, vocabulary: int, generator: np.random.Generator
) -> CandidateSets:
    """Set sizes of 1 plus a geometric number (`mean` in all), at most `limit`; the sampled token is in each set."""
    counts = np.minimum(generator.geometric(1 / mean, len(token_ids)), limit).astype(np.int32)
    others = draw_tokens(int(counts.sum()), vocabulary, generator)
    others[np.cumsum(counts) - counts] = token_ids
    return CandidateSets(counts, others)


@dataclass(frozen=True)
class SampleBytes:
    """Of one sample of P + C tokens, alone in its group."""

    # In the stream's entry: the prompt, which a group has once, and everything else.
    prompt: int
    completion: int
    routing_raw: int
    routing: int
    # Were routing stored layer after layer.
    routing_by_layer: int
    candidates: int
    candidate_set_size: float
    # The whole blob, with what frames its parts.
    replay: int


def measure_sample(
    model: Architecture, length: int, choice: Choice, candidate_set_size: float, generator: np.random.Generator
) -> SampleBytes:
    """`candidate_set_size` 0 stands for sampling from the whole vocabulary."""
    tokens = draw_tokens(length, model.vocabulary, generator)
    routing = draw_routing(model, tokens[:-1], choice, generator)
    sets = None
    if candidate_set_size:
        sets = draw_candidates(tokens[PROMPT:], candidate_set_size, 50, model.vocabulary, generator)
    replay = encode_replay("0123abcd-4567/0/0", Replay(routing, sets))
    message = tensor_pb2.ReplayData.FromString(replay)
    scored = scored_group(tokens[:PROMPT], tokens[PROMPT:], generator)
    prompt = scored.group.prompt.ByteSize()
    return SampleBytes(
        prompt=prompt,
        completion=scored.ByteSize() - prompt,
        routing_raw=0 if routing is None else routing.nbytes,
        routing=len(message.routing.data),
        routing_by_layer=0 if routing is None else len(encode_tensor(routing.transpose(1, 0, 2)).data),
        candidates=len(message.candidate_counts.data) + len(message.candidate_ids.data),
        candidate_set_size=float(sets.counts.mean()) if sets is not None else 0.0,
        replay=len(replay),
    )


def scored_group(
    prompt: Int32[Array, "prompt"], completion: Int32[Array, "completion"], generator: np.random.Generator
) -> sample_pb2.ScoredGroup:
    """A group of one, every field filled as services fill it."""
    lineage = sample_pb2.Lineage(data="0" * 16, code="1" * 16, config="2" * 16, weights="3" * 16)
    group_id = "0123abcd-4567"
    sample = sample_pb2.Sample(
        sample_id=f"{group_id}/0/0",
        token_ids=completion.tolist(),
        logprobs=(-generator.standard_exponential(len(completion), dtype=np.float32)).tolist(),
        finish_reason=sample_pb2.FINISH_REASON_STOP,
        text="word" * (CHARACTERS_PER_TOKEN * len(completion) // 4),
        versions=[sample_pb2.VersionSpan(version=100, start=0, end=len(completion))],
        replay=tensor_pb2.BlobReference(key=f"run:blob:{group_id}/0/0-{0:016x}", size=2**22, checksum=2**63),
    )
    issued = sample_pb2.Prompt(
        group_id=group_id,
        request=4567,
        prompt_id="row-4567",
        purpose=sample_pb2.PURPOSE_TRAIN,
        token_ids=prompt.tolist(),
        text="word" * (CHARACTERS_PER_TOKEN * len(prompt) // 4),
        metadata_json='{"answer": "42"}',
        sampling=sample_pb2.SamplingParameters(temperature=1.0, top_k=50, top_p=0.95, max_tokens=32_768),
        group_size=8,
        min_version=100,
        lineage=lineage,
    )
    return sample_pb2.ScoredGroup(
        group=sample_pb2.Group(
            prompt=issued, samples=[sample], rollout_id="rollout-0", lineage=lineage, sampling_seconds=60.0
        ),
        scores=[sample_pb2.Score(reward=1.0, raw_reward=1.0, components={"math_verify": 1.0})],
        reward_id="reward-0",
    )


def order_bytes(order: step_pb2.StepOrder) -> dict[str, float]:
    """Bytes per completion token of a recorded step, by part, and the mean size of the candidate sets."""
    parts = dict.fromkeys(("entry", "routing_raw", "routing", "candidates", "replay", "candidate_set_size"), 0.0)
    parts["entry"] = float(sum(scored.ByteSize() for scored in order.groups))
    positions = sum(len(sample.token_ids) for scored in order.groups for sample in scored.group.samples)
    for data in order.replay:
        replay = tensor_pb2.ReplayData.FromString(data)
        width = 2 if replay.routing.dtype == "uint16" else 1
        parts["routing_raw"] += int(np.prod(replay.routing.shape)) * width if replay.routing.shape else 0
        parts["routing"] += len(replay.routing.data)
        parts["candidates"] += len(replay.candidate_counts.data) + len(replay.candidate_ids.data)
        parts["replay"] += len(data)
        parts["candidate_set_size"] += replay.candidate_ids.shape[0] if replay.candidate_ids.shape else 0
    packed = zstandard.ZstdCompressor(level=3).compress(order.SerializeToString())
    return {name: value / positions for name, value in parts.items()} | {"order_file": len(packed) / positions}


def checkpoint_bytes(directory: Path, parameters: int) -> dict[str, float]:
    """Bytes for each parameter, by kind of file, of an engine's directory as `TrainEngine.save` writes it."""
    kinds = {"model_states": "*model_states.pt", "optim_states": "*optim_states.pt"}
    return {
        kind: sum(path.stat().st_size for path in directory.rglob(pattern)) / parameters
        for kind, pattern in kinds.items()
    }


def write_checkpoint(model: str, stage: int, dtype: str, directory: Path) -> dict[str, float]:
    """One optimizer step on one sample, then a checkpoint and an export. Bytes for each parameter.

    Loads DeepSpeed.
    """
    from services.common.config import parse_config
    from services.trainer.batch.packing import pack
    from services.trainer.batch.samples import TrainSample
    from services.trainer.engine.deepspeed_engine import open_engine

    config = parse_config(
        {
            "run": {"name": "measure"},
            "model": {"path": model, "dtype": dtype, "max_length": 64},
            "data": {"train": {"kind": "jsonl", "path": "none.jsonl"}, "max_prompt_tokens": 8},
            "sampling": {"max_tokens": 8},
            "reward": {"scorers": [{"name": "exact_match"}]},
            "rl_stability": {"consistency": {"keep_routing": False}},
            "trainer": {"device": "cpu", "zero_stage": stage},
        }
    )
    engine = open_engine(config)
    ids = np.arange(8, dtype=np.int32)
    sample = TrainSample("one", ids[:4], ids[4:], np.zeros(4, dtype=np.float32), Replay(), advantage=1.0)
    engine.backward(-engine.forward(pack([sample]), keep_routing=False).logprobs.sum(), last=True)
    engine.step()
    engine.save(directory / "engine")
    engine.export(directory / "policy")
    engine.close()
    weights = next((directory / "policy").glob("*.safetensors"))
    parameters = _stored_numbers(weights)
    return checkpoint_bytes(directory / "engine", parameters) | {"policy": weights.stat().st_size / parameters}


def _stored_numbers(weights: Path) -> int:
    from safetensors import safe_open

    with safe_open(weights, framework="np") as file:
        return sum(int(np.prod(file.get_slice(name).get_shape())) for name in file.keys())  # noqa: SIM118


def table(title: str, header: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [f"### {title}", "", f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), "", ""])


def routing_rows(lengths: Sequence[int], seed: int) -> Iterator[list[str]]:
    """Bytes of routing for each forwarded token."""
    for model in MODELS:
        for choice in CHOICES if model.experts else ():
            for length in lengths:
                measured = measure_sample(model, length, choice, 0, np.random.default_rng(seed))
                positions = length - 1
                yield [
                    model.name,
                    choice,
                    str(length),
                    *(
                        f"{value / positions:.1f}"
                        for value in (measured.routing_raw, measured.routing, measured.routing_by_layer)
                    ),
                ]


def token_rows(lengths: Sequence[int], seed: int) -> Iterator[list[str]]:
    """Bytes for each completion token, and for each prompt token, of what does not depend on experts."""
    model = MODELS[0]
    for mean in (2.0, 4.0, 20.0):
        for length in lengths:
            measured = measure_sample(model, length, "uniform", mean, np.random.default_rng(seed))
            completion = length - PROMPT
            yield [
                f"{measured.candidate_set_size:.2f}",
                str(length),
                f"{measured.prompt / PROMPT:.1f}",
                f"{measured.completion / completion:.1f}",
                f"{measured.candidates / completion:.1f}",
            ]


def recorded_rows(run: Path) -> Iterator[list[str]]:
    for recorded in recorded_steps(run):
        parts = order_bytes(recorded.order())
        names = ("entry", "routing_raw", "routing", "candidate_set_size", "candidates", "order_file")
        yield [str(recorded.record.step), *(f"{parts[name]:.2f}" for name in names)]


def checkpoint_rows(model: str) -> Iterator[list[str]]:
    # DeepSpeed joins a process group once: each engine has a process of its own.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as processes:
        for stage in (1, 3):
            for dtype in ("float32", "bfloat16"):
                with tempfile.TemporaryDirectory() as directory:
                    found = processes.submit(write_checkpoint, model, stage, dtype, Path(directory)).result()
                yield [str(stage), dtype, *(f"{value:.2f}" for value in found.values())]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Bytes of real messages and files.")
    parser.add_argument("--recorded", type=Path, metavar="RUN", help="a run's directory with recorded steps")
    parser.add_argument("--checkpoints", metavar="MODEL", help="a small model's directory; loads DeepSpeed")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="P + C, prompt and completion together")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if options.recorded:
        header = ["step", "entry", "routing raw", "routing", "mean candidate set", "candidates", "order file"]
        sys.stdout.write(table("Recorded steps, a completion token", header, recorded_rows(options.recorded)))
    elif options.checkpoints:
        header = ["ZeRO", "dtype", "model_states", "optim_states", "policy"]
        sys.stdout.write(table("Checkpoints, a parameter", header, checkpoint_rows(options.checkpoints)))
    else:
        header = ["model", "choice", "P + C", "raw", "as stored", "were it layer by layer"]
        sys.stdout.write(table("Routing, a forwarded token", header, routing_rows(options.lengths, options.seed)))
        header = ["mean candidate set", "P + C", "entry, a prompt token", "entry", "candidates"]
        sys.stdout.write(table("The rest, a completion token", header, token_rows(options.lengths, options.seed)))


if __name__ == "__main__":
    main()
