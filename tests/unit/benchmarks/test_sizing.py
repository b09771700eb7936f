import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from trivet.v1 import sample_pb2, step_pb2

from benchmarks import measure_bytes
from benchmarks.sizing import __main__ as command
from benchmarks.sizing.architecture import DENSE_8B, MODELS, MOE_30B, MOE_671B, Architecture
from benchmarks.sizing.assumptions import H100, H200, Assumptions, MeasuredBytes, Workload
from benchmarks.sizing.case import EXAMPLES, MEASURED, example_cases
from benchmarks.sizing.data_plane import (
    broadcast_seconds,
    data_plane,
    largest_checkpoint_every,
    longest_sample,
    routing_on_hosts,
    sample_bytes,
)
from benchmarks.sizing.sampling import (
    Replica,
    cache_tokens,
    decode_seconds,
    most_sequences,
    rollouts_for,
    weights_read,
)
from benchmarks.sizing.storage import by_disk, by_nccl, checkpoint_bytes, recorded_step_bytes
from benchmarks.sizing.tables import seconds, size, tables
from benchmarks.sizing.training import (
    TrainerSetup,
    activation_bytes_per_token,
    forwards,
    gpu_memory,
    host_memory_at_start,
    state_bytes,
    step_time,
)
from services.common.config import ConfigError, load_config
from services.common.wire.replay_data import decode_replay, encode_replay

DOCUMENT = Path(__file__).parents[3] / "docs" / "scaling.md"
WORK = Workload(
    groups=4, group_size=2, prompt=100, completion=900, longest=2000, candidates=4, max_staleness=1, checkpoint_every=5
)
BYTES = MeasuredBytes(
    routing_share_128=0.5,
    routing_share_256=1.0,
    prompt_token=7,
    completion_token=11,
    candidate_base=1,
    candidate_id=2,
)
SETUP = TrainerSetup(
    ranks=8, zero_stage=3, tokens_per_microbatch=1000, gradient_checkpointing=True, reference="bfloat16"
)


def on_meta(model: Architecture) -> tuple[int, int]:
    """Parameters and MoE layers of the model that transformers builds from the same dimensions."""
    import torch
    from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3Config, Qwen3MoeConfig

    common = {
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "vocab_size": model.vocabulary,
        "num_attention_heads": model.attention.heads,
        "tie_word_embeddings": False,
    }
    if model is MOE_671B:
        config = DeepseekV3Config(
            **common,
            num_key_value_heads=128,
            intermediate_size=18_432,
            moe_intermediate_size=2048,
            n_routed_experts=256,
            num_experts_per_tok=8,
            n_shared_experts=1,
            first_k_dense_replace=3,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=128,
            v_head_dim=128,
        )
    elif model is MOE_30B:
        config = Qwen3MoeConfig(
            **common, num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128
        )
    else:
        config = Qwen3Config(**common, num_key_value_heads=8, head_dim=128, intermediate_size=12_288)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    moe = sum(name.endswith("mlp.experts.down_proj") for name, _ in built.named_parameters())
    return sum(parameter.numel() for parameter in built.parameters()), moe


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_parameters_are_those_of_the_model_built_from_the_same_dimensions(model: Architecture) -> None:
    assert on_meta(model) == (model.parameters, model.moe_layers)


def test_active_parameters_and_cache() -> None:
    # 30B-A3B: a layer's attention 2048·128·(2·32 + 2·4) + 2·128 + 2·2048, router 2048·128, experts 8 · 3·2048·768.
    layer = 18_874_368 + 256 + 4096 + 262_144 + 37_748_736
    assert MOE_30B.active_parameters == 2 * 151_936 * 2048 + 2048 + 48 * layer
    assert DENSE_8B.active_parameters == DENSE_8B.parameters
    # 2 bytes · layers · (keys and values of each KV head, or one latent of 512 with 64 rotary numbers).
    assert [model.kv_bytes_per_token for model in MODELS] == [2 * 36 * 2048, 2 * 48 * 1024, 2 * 61 * 576]
    assert [model.routing_choices for model in MODELS] == [0, 384, 464]


def test_forward_flops_grow_with_the_length() -> None:
    # Two tokens' worth of attention cancels; what stays is layers · (q·k + weighted v) for each further position.
    assert DENSE_8B.forward_flops(2000) - DENSE_8B.forward_flops(1000) == 36 * 2 * 32 * 128 * 1000
    assert DENSE_8B.forward_flops(0) == 2 * (DENSE_8B.parameters - 2 * 151_936 * 4096)


def test_a_sample_and_a_step() -> None:
    sample = sample_bytes(MOE_30B, WORK, BYTES)
    assert sample.routing == 384 * 0.5 * 999
    assert sample.candidates == (1 + 2 * 4) * 900
    assert sample.entry == 7 * 100 / 2 + 11 * 900
    assert sample_bytes(DENSE_8B, replace(WORK, candidates=0), BYTES).blob == 0
    plane = data_plane(MOE_30B, WORK, BYTES)
    assert plane.order == 8 * sample.total
    assert plane.steps_held == 5 + 1 + 1
    assert plane.redis_memory(blobs_in_redis=True) == 7 * 8 * sample.total
    assert plane.redis_memory(blobs_in_redis=False) == 7 * 8 * sample.entry
    assert plane.redis_traffic(blobs_in_redis=True) == 8 * (4 * sample.entry + 2 * sample.blob)


def test_what_one_redis_holds() -> None:
    plane = data_plane(MOE_30B, WORK, BYTES)
    assumptions = Assumptions(redis_memory=10.5 * plane.order)
    assert largest_checkpoint_every(plane, WORK, assumptions, blobs_in_redis=True) == 10 - 1 - 1
    elsewhere = int(10.5 * plane.order / plane.entries_per_step) - 2
    assert largest_checkpoint_every(plane, WORK, assumptions, blobs_in_redis=False) == elsewhere
    small = Assumptions(redis_memory=2.9 * plane.order)
    assert largest_checkpoint_every(plane, WORK, small, blobs_in_redis=True) is None
    sample = sample_bytes(MOE_30B, WORK, BYTES)
    assert longest_sample(sample, WORK, int(sample.blob * 3)) == pytest.approx(3000, abs=1)


def test_broadcast_and_decoding() -> None:
    assumptions = Assumptions(interconnect=50, host_copy=25)
    assert broadcast_seconds(100, assumptions) == 100 / 50 + 2 * 100 / 25
    assert routing_on_hosts(MOE_671B, WORK, 8) == 8 * 8 * 464 * 999


def test_zero_cuts_optimizer_then_gradients_then_parameters() -> None:
    assert [state_bytes(1000, 4, stage) for stage in (1, 2, 3)] == [7000, 5500, 4000]  # type: ignore[arg-type]
    assert {state_bytes(1000, 1, stage) for stage in (1, 2, 3)} == {16_000}  # type: ignore[arg-type]


def test_trainer_memory() -> None:
    memory = gpu_memory(DENSE_8B, SETUP)
    assert memory.state == 2 * DENSE_8B.parameters
    assert memory.gathered == 4 * DENSE_8B.largest_layer
    assert memory.reference == 2 * DENSE_8B.parameters / 8
    # A layer: 4·4096 + 128·(2·32 + 2·8) + 4·12288 numbers of 2 bytes; and each layer's input.
    layer = 2 * (16_384 + 10_240 + 49_152)
    assert memory.activations == 1000 * (layer + 2 * 36 * 4096)
    assert activation_bytes_per_token(DENSE_8B, gradient_checkpointing=False) == 36 * layer
    assert gpu_memory(DENSE_8B, replace(SETUP, reference="int8")).reference == DENSE_8B.parameters
    assert gpu_memory(DENSE_8B, replace(SETUP, reference_on_gpu=False)).reference == 0
    assert gpu_memory(DENSE_8B, replace(SETUP, zero_stage=1)).reference == 2 * DENSE_8B.parameters


def test_zero_3_reads_a_model_that_no_rank_holds() -> None:
    assert gpu_memory(DENSE_8B, SETUP).start == 2 * DENSE_8B.parameters / 8 + 2 * DENSE_8B.largest_layer
    assert gpu_memory(DENSE_8B, replace(SETUP, zero_stage=2)).start == 2 * DENSE_8B.parameters
    # The embedding; of an MoE layer, 128 times gate and up.
    assert host_memory_at_start(DENSE_8B, SETUP, Assumptions()) == 8 * 6 * 151_936 * 4096
    assert host_memory_at_start(MOE_30B, replace(SETUP, ranks=3), Assumptions()) == 3 * 6 * 128 * 2 * 2048 * 768
    for whole in (
        replace(SETUP, zero_stage=1),
        replace(SETUP, reference="int8"),
        replace(SETUP, reference_on_gpu=False),
    ):
        assert host_memory_at_start(DENSE_8B, whole, Assumptions()) == 8 * 2 * DENSE_8B.parameters


def test_step_time() -> None:
    assumptions = Assumptions(training_mfu=0.5, nvlink=1e9, interconnect=1e8)
    assert forwards(SETUP) == 6
    assert forwards(replace(SETUP, gradient_checkpointing=False, reference="none")) == 4
    time = step_time(DENSE_8B, WORK, SETUP, H100, assumptions)
    assert time.compute == pytest.approx(8000 * 6 * DENSE_8B.forward_flops(1000) / (8 * 989e12 * 0.5))
    # One micro-batch of 1000 tokens on each of 8 ranks; three gathers, a scatter and the reference's gather.
    assert time.traffic == 5 * 2 * DENSE_8B.parameters / 1e9
    for other in (replace(SETUP, reference="int8"), replace(SETUP, reference_on_gpu=False)):
        assert step_time(DENSE_8B, WORK, other, H100, assumptions).traffic == 4 * 2 * DENSE_8B.parameters / 1e9
    across = step_time(DENSE_8B, WORK, replace(SETUP, ranks=16), H100, assumptions)
    assert across.traffic == 5 * 2 * DENSE_8B.parameters / 1e8
    assert step_time(DENSE_8B, WORK, replace(SETUP, zero_stage=1), H100, assumptions).traffic == time.traffic * 2 / 5


def test_cache_is_cut_by_heads_and_a_latent_is_not() -> None:
    assumptions = Assumptions(memory_share=0.9)
    assert cache_tokens(DENSE_8B, Replica(1), H100, assumptions) == int((72e9 - 2 * DENSE_8B.parameters) / 147_456)
    assert cache_tokens(DENSE_8B, Replica(2), H100, assumptions) == int((72e9 - DENSE_8B.parameters) / 73_728)
    latent = cache_tokens(MOE_671B, Replica(16), H200, assumptions)
    assert latent == int((0.9 * 141e9 - MOE_671B.parameters / 8) / 70_272)
    assert cache_tokens(MOE_671B, Replica(8), H100, assumptions) == 0
    assert most_sequences(MOE_671B, WORK, Replica(16), H200, assumptions) == latent // 550


def test_a_batch_reads_the_experts_that_it_touches() -> None:
    experts = 48 * 128 * 3 * 2048 * 768
    rest = MOE_30B.parameters - 151_936 * 2048 - experts
    assert weights_read(MOE_30B, 1) == pytest.approx(2 * (rest + experts * 8 / 128))
    assert weights_read(MOE_30B, 10_000) == pytest.approx(2 * (rest + experts))


def test_decoding_is_bound_by_memory_or_by_compute() -> None:
    slow_memory = Assumptions(bandwidth_share=0.5, sampling_mfu=1.0)
    read = weights_read(DENSE_8B, 1) + 550 * 147_456
    assert decode_seconds(DENSE_8B, WORK, Replica(1), 1, H100, slow_memory) == pytest.approx(read / (3.35e12 * 0.5))
    slow_compute = Assumptions(bandwidth_share=1.0, sampling_mfu=1e-4)
    flops = DENSE_8B.forward_flops(1100) + 2 * 151_936 * 4096
    assert decode_seconds(DENSE_8B, WORK, Replica(2), 3, H100, slow_compute) == pytest.approx(
        3 * flops / (2 * 989e12 * 1e-4)
    )


def plan(step: float, *, stall: float = 0.0, work: Workload = WORK) -> object:
    return rollouts_for(
        DENSE_8B, work, Replica(1), H100, Assumptions(), step_seconds=step, stall=lambda replicas: stall * replicas
    )


def test_the_fewest_rollouts_that_keep_up() -> None:
    one = decode_seconds(DENSE_8B, WORK, Replica(1), 8, H100, Assumptions()) * 900
    found = plan(one)
    assert (found.replicas, found.sequences, found.step_seconds) == (1, 8, one)  # type: ignore[attr-defined]
    assert plan(one * 0.999).replicas == 2  # type: ignore[attr-defined]
    assert plan(one, stall=0.5 * one) is None
    alone = decode_seconds(DENSE_8B, WORK, Replica(1), 1, H100, Assumptions()) * 900
    assert plan(alone * 1.001).replicas == 8  # type: ignore[attr-defined]
    assert plan(alone * 0.999) is None


def test_sampling_needs_room_and_something_to_do() -> None:
    with pytest.raises(ValueError, match="do not hold 671B MoE"):
        rollouts_for(MOE_671B, WORK, Replica(1), H100, Assumptions(), step_seconds=1, stall=lambda _: 0)
    with pytest.raises(ValueError, match="max_staleness is 0, expected at least 1"):
        plan(1, work=replace(WORK, max_staleness=0))


def test_files() -> None:
    assert checkpoint_bytes(DENSE_8B, 3) == 14 * DENSE_8B.parameters
    assert checkpoint_bytes(DENSE_8B, 1) == 16 * DENSE_8B.parameters
    assert recorded_step_bytes(DENSE_8B, 1, 100.0) == 16 * DENSE_8B.parameters + 100
    size_of_weights = 2 * DENSE_8B.parameters
    assumptions = Assumptions(interconnect=10, host_copy=5, disk_write=2, disk_read=4, page_cache=8)
    disk = by_disk(DENSE_8B, 17, assumptions)
    assert disk.trainer == pytest.approx(size_of_weights * (0.1 + 0.2 + 0.5 + 0.125))
    assert disk.rollout == pytest.approx(size_of_weights * (3 / 4 + 1 / 8))
    assert by_nccl(DENSE_8B, assumptions).trainer == size_of_weights / 10


def test_numbers_are_read_by_people() -> None:
    assert [size(value) for value in (12, 1500, 2.75e6, 61.1e9, 1.34e12)] == [
        "12 B",
        "1.5 kB",
        "2.75 MB",
        "61.1 GB",
        "1.34 TB",
    ]
    assert [seconds(value) for value in (0.0082, 4.14, 919.4)] == ["0.0082 s", "4.1 s", "919 s"]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_load_and_stand_in_the_document(path: Path) -> None:
    load_config(path, environment={})
    assert path.read_text() in DOCUMENT.read_text()


def test_the_document_quotes_the_calculator() -> None:
    printed, document = tables(example_cases()), DOCUMENT.read_text()
    assert len(re.findall(r"^\| --- ", printed, re.MULTILINE)) == 6
    for table in printed.strip().split("\n\n"):
        assert table in document


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    every = capsys.readouterr().out
    assert command.main(["--config", str(EXAMPLES / "30b-a3b.yaml"), "--model", "30B-A3B"]) == 0
    one = capsys.readouterr().out
    assert "| checkpoint / recorded step | 427 GB / 430 GB |" in one
    assert "| checkpoint / recorded step | 115 GB / 115 GB | 427 GB / 430 GB | 9.39 TB / 9.43 TB |" in every
    assert command.main(["--interconnect", "25e9", "--plot", str(tmp_path / "bytes.png")]) == 0
    assert capsys.readouterr().out != every
    assert (tmp_path / "bytes.png").stat().st_size > 1000
    assert command.main(["--config", str(tmp_path / "none.yaml")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_float32_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text((EXAMPLES / "8b-dense.yaml").read_text().replace("bfloat16, max", "float32, max"))
    with pytest.raises(ConfigError):
        load_config(path, ["sampling.max_tokens=99999"], environment={})
    assert command.main(["--config", str(path)]) == 2


@pytest.mark.parametrize("model", [MOE_30B, MOE_671B], ids=lambda model: model.name)
def test_measured_routing_is_what_the_calculator_takes(model: Architecture) -> None:
    measured = measure_bytes.measure_sample(model, 768, "uniform", 4.0, np.random.default_rng(3))
    assert model.experts is not None
    assert measured.routing_raw == model.routing_choices * 767
    assert measured.routing / measured.routing_raw == pytest.approx(
        MEASURED.routing_share(model.experts.count), rel=0.01
    )


def test_measured_tokens_are_what_the_calculator_takes() -> None:
    measured = measure_bytes.measure_sample(DENSE_8B, 8192, "uniform", 4.0, np.random.default_rng(3))
    assert measured.prompt / 512 == pytest.approx(MEASURED.prompt_token, rel=0.05)
    assert measured.completion / 7680 == pytest.approx(MEASURED.completion_token, rel=0.05)
    expected = MEASURED.candidate_base + MEASURED.candidate_id * measured.candidate_set_size
    assert measured.candidates / 7680 == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("choice", measure_bytes.CHOICES)
def test_drawn_routing_is_a_valid_record(choice: measure_bytes.Choice) -> None:
    generator = np.random.default_rng(5)
    tokens = measure_bytes.draw_tokens(40, MOE_30B.vocabulary, generator)
    routing = measure_bytes.draw_routing(MOE_30B, tokens[:-1], choice, generator)
    sets = measure_bytes.draw_candidates(tokens[10:], 3.0, 50, MOE_30B.vocabulary, generator)
    starts = np.cumsum(sets.counts) - sets.counts
    assert (sets.token_ids[starts] == tokens[10:]).all()
    data = encode_replay("s", measure_bytes.Replay(routing))
    decoded = decode_replay(data, sample_id="s", prompt_length=10, token_ids=tokens[10:])
    assert decoded.routing is not None
    assert routing is not None
    assert (decoded.routing == routing).all()
    assert routing.max() < 128


def test_choices_differ_in_skew() -> None:
    tokens = measure_bytes.draw_tokens(2000, MOE_30B.vocabulary, np.random.default_rng(5))

    def repeated(choice: measure_bytes.Choice) -> tuple[float, float]:
        """Share of the most popular eighth of a layer's experts; agreement of positions that hold the same token."""
        routing = measure_bytes.draw_routing(MOE_30B, tokens, choice, np.random.default_rng(6))
        assert routing is not None
        layer = routing[:, 0]
        counts = np.sort(np.bincount(layer.ravel(), minlength=128))[::-1]
        ids, frequency = np.unique(tokens, return_counts=True)
        same = layer[tokens == ids[frequency.argmax()]]
        agreement = np.mean([len(set(same[0]) & set(row)) / 8 for row in same[1:]])
        return counts[:16].sum() / counts.sum(), float(agreement)

    uniform, popular, bound = (repeated(choice) for choice in measure_bytes.CHOICES)
    assert uniform[0] < 0.2 < popular[0]
    assert uniform[1] < 0.2 < bound[1]


def test_bytes_of_a_recorded_order() -> None:
    generator = np.random.default_rng(1)
    tokens = measure_bytes.draw_tokens(20, MOE_30B.vocabulary, generator)
    sets = measure_bytes.draw_candidates(tokens[10:], 3.0, 50, MOE_30B.vocabulary, generator)
    routing = measure_bytes.draw_routing(MOE_30B, tokens[:-1], "uniform", generator)
    scored = measure_bytes.scored_group(tokens[:10], tokens[10:], generator)
    data = encode_replay("s", measure_bytes.Replay(routing, sets))
    found = measure_bytes.order_bytes(step_pb2.StepOrder(groups=[scored], replay=[data]))
    assert found["routing_raw"] == 384 * 19 / 10
    assert found["candidate_set_size"] == len(sets.token_ids) / 10
    assert found["replay"] == len(data) / 10
    assert found["entry"] == scored.ByteSize() / 10
    assert sample_pb2.ScoredGroup.FromString(scored.SerializeToString()) == scored
