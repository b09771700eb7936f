"""The real vLLM against the Hugging Face model: one engine, started once."""

import asyncio
import errno
import functools
import shutil

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeForCausalLM
from trivet.v1 import sample_pb2

from services.common.transport.weight_feed import describe_weights
from services.rollout.engine.protocol import EngineFailed, LoadFailed
from services.rollout.vllm_engine.environment import set_defaults
from tests.support.vllm_models import (
    LAYERS,
    LONG,
    PROMPT,
    TOP,
    TOP_K,
    VOCABULARY,
    begun,
    configuration,
    ids,
    is_version,
    make_model,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

PLAIN = sample_pb2.SamplingParameters(temperature=1.0, top_p=1.0, max_tokens=24)
TOP_KP = sample_pb2.SamplingParameters(temperature=0.9, top_k=20, top_p=0.8, max_tokens=24)
WARM = sample_pb2.SamplingParameters(temperature=0.7, top_p=1.0, max_tokens=24)
TOP_P = sample_pb2.SamplingParameters(temperature=1.0, top_p=0.7, max_tokens=24)


@functools.cache
def reference(path):
    return Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def forward(path, token_ids):
    """Logits [T, V] and the routers' scores [T, layers, EXPERTS]."""
    model, scores = reference(path), []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, output: scores.append(output[0].softmax(-1)))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        logits = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(scores, dim=1)


def is_top(routing, scores):
    """Per row and layer: the experts are the TOP best of the router, but for scores that rounding cannot tell apart."""
    chosen = scores.gather(2, torch.from_numpy(routing.astype(np.int64)))
    return (chosen.min(dim=2).values >= scores.topk(TOP).values[:, :, -1] - 1e-6).numpy()


def expected_logprobs(logits, sample, sampling):
    """log-softmax over the recorded candidates, at the sampler's temperature."""
    start = len(PROMPT) - 1
    expected, offset = [], 0
    for position, token in enumerate(sample.token_ids):
        row = logits[start + position] / sampling.temperature
        if sample.replay.candidates is not None:
            count = sample.replay.candidates.counts[position]
            ids = sample.replay.candidates.token_ids[offset : offset + count]
            offset += count
            assert token in ids
            expected.append((row[token] - row[torch.tensor(ids, dtype=torch.long)].logsumexp(0)).item())
        else:
            expected.append(row.log_softmax(0)[token].item())
    return np.asarray(expected)


def nucleus(row, sampling):
    """The candidate set computed anew: top-k with its ties, then the smallest set that holds top_p."""
    allowed = row.clone()
    if sampling.top_k:
        allowed[row < row.topk(sampling.top_k).values[-1]] = -torch.inf
    ordered, index = allowed.sort()
    if sampling.top_p < 1:
        outside = ordered.softmax(0).cumsum(0) <= 1 - sampling.top_p
        outside[-1] = False
        ordered[outside] = -torch.inf
    return set(index[ordered > -torch.inf].tolist())


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {seed: make_model(root / f"model-{seed}", seed) for seed in (1, 2, 3)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(paths):
    set_defaults()
    from services.rollout.vllm_engine.engine import VllmEngine

    engine = VllmEngine(configuration(paths[1], top_k=20), seed=7)
    await engine.launch()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def base_weights(engine, paths):
    """Every test starts from version 0."""
    await engine.load_weights(describe_weights(paths[1], 0))


@pytest.mark.parametrize("sampling", [PLAIN, TOP_K, TOP_KP, TOP_P], ids=["plain", "top_k", "top_k_p", "top_p"])
async def test_samples_agree_with_the_hugging_face_model(engine, paths, sampling):
    # Two groups at once, so that rows of different requests lie mixed in a batch.
    groups = await asyncio.gather(
        engine.generate(PROMPT, sampling, ids(8, "a"), capture=True),
        engine.generate(PROMPT, sampling, ids(8, "b"), capture=True),
    )
    samples = [sample for group in groups for sample in group]
    assert len(samples) == 16
    assert len({tuple(sample.token_ids) for sample in samples}) > 8
    for sample in samples:
        logits, scores = forward(paths[1], [*PROMPT, *sample.token_ids.tolist()])
        assert sample.replay.routing.shape == (len(PROMPT) + len(sample.token_ids) - 1, LAYERS, TOP)
        assert is_top(sample.replay.routing, scores[:-1]).all()
        assert sample.replay.routing.dtype == np.uint8
        np.testing.assert_allclose(sample.logprobs, expected_logprobs(logits, sample, sampling), atol=1e-5, rtol=0)
        assert (sample.replay.candidates is None) == (sampling is PLAIN)
        assert is_version(sample, 0)
        assert sample.finish_reason == ("stop" if sample.token_ids[-1] == 1 else "length")


async def test_candidate_sets_are_those_of_the_sampler(engine, paths):
    sample = (await engine.generate(PROMPT, TOP_KP, ids(1), capture=True))[0]
    logits, _ = forward(paths[1], [*PROMPT, *sample.token_ids.tolist()])
    sets = np.split(sample.replay.candidates.token_ids, np.cumsum(sample.replay.candidates.counts)[:-1])
    assert len(sets) == len(sample.token_ids)
    for position, found in enumerate(sets):
        assert set(found.tolist()) == nucleus(logits[len(PROMPT) - 1 + position] / TOP_KP.temperature, TOP_KP)


async def test_ties_at_the_cutoff_are_recorded(engine, paths, tmp_path):
    """With all embeddings alike every logit is equal: top_k 2 keeps the whole vocabulary."""
    tied = shutil.copytree(paths[1], tmp_path / "tied")
    tensors = load_file(tied / "model.safetensors")
    tensors["model.embed_tokens.weight"][:] = tensors["model.embed_tokens.weight"][5]
    save_file(tensors, tied / "model.safetensors", metadata={"format": "pt"})
    await engine.load_weights(describe_weights(tied, 9))
    sampling = sample_pb2.SamplingParameters(temperature=1.0, top_k=2, top_p=1.0, max_tokens=3)
    sample = (await engine.generate(PROMPT, sampling, ids(1), capture=True))[0]
    assert set(sample.replay.candidates.counts.tolist()) == {VOCABULARY}
    np.testing.assert_allclose(sample.logprobs, -np.log(VOCABULARY), atol=1e-5)


async def test_evaluation_carries_no_replay_and_greedy_is_greedy(engine, paths):
    greedy = sample_pb2.SamplingParameters(temperature=0.0, top_p=1.0, max_tokens=12)
    first, second = await engine.generate(PROMPT, greedy, ids(2), capture=False)
    assert first.replay is None
    assert first.token_ids.tolist() == second.token_ids.tolist()
    logits, _ = forward(paths[1], [*PROMPT, *first.token_ids.tolist()])
    best = logits[len(PROMPT) - 1 : -1].argmax(dim=1).tolist()
    assert first.token_ids.tolist() == best


async def test_greedy_and_recorded_requests_share_a_batch(engine, paths):
    greedy = sample_pb2.SamplingParameters(temperature=0.0, top_p=1.0, max_tokens=24)
    recorded, _ = await asyncio.gather(
        engine.generate(PROMPT, TOP_K, ids(4, "r"), capture=True),
        engine.generate(PROMPT[:5], greedy, ids(4, "g"), capture=False),
    )
    for sample in recorded:
        logits, _ = forward(paths[1], [*PROMPT, *sample.token_ids.tolist()])
        np.testing.assert_allclose(sample.logprobs, expected_logprobs(logits, sample, TOP_K), atol=1e-5, rtol=0)


async def test_a_seed_is_refused_where_a_prompt_may_be_prefilled_in_parts(engine):
    seeded = sample_pb2.SamplingParameters(temperature=1.0, top_p=1.0, max_tokens=8, seed=11)
    for recorded in (True, False):
        assert "enable_chunked_prefill" in engine.refusal(seeded, recorded)
        assert engine.refusal(PLAIN, recorded) is None


async def test_a_seed_gives_the_same_samples_again(paths):
    from services.rollout.vllm_engine.engine import VllmEngine

    # Each prompt fills most of a step: in parts, the second would end the engine.
    long = [10 + i % 40 for i in range(1500)]
    seeded = sample_pb2.SamplingParameters(temperature=1.0, top_p=1.0, max_tokens=8, seed=11)
    whole = VllmEngine(
        configuration(paths[1], engine={"enable_chunked_prefill": False, "max_num_batched_tokens": 2048}), seed=7
    )
    await whole.launch()
    try:
        assert whole.refusal(seeded, True) is None
        runs = [await whole.generate(long, seeded, ids(3), capture=True) for _ in range(2)]
    finally:
        await whole.close()
    tokens = [[sample.token_ids.tolist() for sample in run] for run in runs]
    assert tokens[0] == tokens[1]
    assert tokens[0][0] != tokens[0][1]


async def test_nothing_is_left_in_the_worker(engine):
    await engine.generate(PROMPT, TOP_K, ids(4), capture=True)
    task = asyncio.create_task(engine.generate(PROMPT, LONG, ids(2, "gone"), capture=True))
    await begun(engine, 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await engine.generate(PROMPT, TOP_K, ids(1), capture=True)
    assert await engine._llm.collective_rpc("trivet_held") == [0]


async def test_new_weights_are_sampled_and_replayed(engine, paths):
    await engine.load_weights(describe_weights(paths[2], 1))
    assert engine.weights.version == 1
    for sample in await engine.generate(PROMPT, TOP_KP, ids(4), capture=True):
        assert is_version(sample, 1)
        tokens = [*PROMPT, *sample.token_ids.tolist()]
        logits, scores = forward(paths[2], tokens)
        np.testing.assert_allclose(sample.logprobs, expected_logprobs(logits, sample, TOP_KP), atol=1e-5, rtol=0)
        assert is_top(sample.replay.routing, scores[:-1]).all()
        old, _ = forward(paths[1], tokens)
        assert np.abs(sample.logprobs - expected_logprobs(old, sample, TOP_KP)).max() > 1e-2


async def test_an_update_in_flight_gives_two_spans_with_the_routing_of_each_draw(engine, paths):
    task = asyncio.create_task(engine.generate(PROMPT, LONG, ids(4), capture=True))
    await begun(engine, 4)
    await engine.load_weights(describe_weights(paths[2], 1))
    samples = await task
    mixed = [sample for sample in samples if len(sample.spans) == 2]
    assert mixed, "every sample ended before the update"
    for sample in mixed:
        first, second = sample.spans
        assert (first.version, first.start, second.version, second.end) == (0, 0, 1, len(sample.token_ids))
        assert first.end == second.start
        tokens = [*PROMPT, *sample.token_ids.tolist()]
        expected = [expected_logprobs(forward(paths[seed], tokens)[0], sample, LONG) for seed in (1, 2)]
        np.testing.assert_allclose(sample.logprobs[: first.end], expected[0][: first.end], atol=1e-5, rtol=0)
        np.testing.assert_allclose(sample.logprobs[first.end :], expected[1][first.end :], atol=1e-5, rtol=0)
        # The row of position P − 1 + i is of the pass that drew token i.
        edge = len(PROMPT) - 1 + first.end
        old, new = (forward(paths[seed], tokens)[1][:-1] for seed in (1, 2))
        assert is_top(sample.replay.routing[:edge], old[:edge]).all()
        assert is_top(sample.replay.routing[edge:], new[edge:]).all()
        assert not is_top(sample.replay.routing[:edge], new[:edge]).all()


def truncated(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def other_shape(path):
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(32)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def unknown_tensor(path):
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.shared_expert.weight"] = torch.ones(4)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def flipped(path):
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "published", "code"),
    [
        (truncated, True, "weights_corrupt"),
        (flipped, True, "weights_corrupt"),
        (shutil.rmtree, True, "weights_missing"),
        (truncated, False, "weights_corrupt"),
        (other_shape, False, "weights_mismatch"),
        (unknown_tensor, False, "weights_mismatch"),
    ],
)
async def test_a_bad_checkpoint_keeps_the_old_version(engine, paths, tmp_path, damage, published, code):
    """Damaged after it was published, or published as it is."""
    path = shutil.copytree(paths[3], tmp_path / "bad")
    weights = describe_weights(path, 5)
    damage(path)
    if not published:
        weights = describe_weights(path, 5)
    with pytest.raises(LoadFailed) as failure:
        await engine.load_weights(weights)
    assert failure.value.code == code
    assert engine.weights.version == 0
    sample = (await engine.generate(PROMPT, TOP_K, ids(1), capture=True))[0]
    assert is_version(sample, 0)


async def test_a_read_error_keeps_the_old_version_and_the_engine(engine, paths, monkeypatch):
    """EIO, as of a disk or a network file system that does not answer."""
    weights, identity = describe_weights(paths[3], 5), engine.identity

    def fail(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("services.common.transport.weight_feed._checksum", fail)
        with pytest.raises(LoadFailed, match="Input/output error") as failure:
            await engine.load_weights(weights)
    assert failure.value.code == "weights_unreadable"
    assert (engine.weights.version, engine.identity, engine.problem) == (0, identity, None)
    await engine.load_weights(weights)
    assert engine.weights.version == 5


async def test_the_engine_comes_back_with_its_weights_when_its_process_dies(engine, paths):
    await engine.load_weights(describe_weights(paths[2], 4))
    running = asyncio.create_task(engine.generate(PROMPT, LONG, ids(2), capture=True))
    await begun(engine, 2)
    for process in engine._llm.engine_core.resources.engine_manager.processes:
        process.kill()
    with pytest.raises(EngineFailed) as failure:
        await running
    assert failure.value.code == "engine_dead"
    sample = (await engine.generate(PROMPT, TOP_K, ids(1), capture=True))[0]
    assert engine.weights.version == 4
    assert is_version(sample, 4)
    logits, _ = forward(paths[2], [*PROMPT, *sample.token_ids.tolist()])
    np.testing.assert_allclose(sample.logprobs, expected_logprobs(logits, sample, TOP_K), atol=1e-5, rtol=0)


async def test_a_load_that_breaks_the_engine_restarts_it(engine, paths, tmp_path):
    """Not even verification finds everything: here the weights vanish between it and the load."""
    path = shutil.copytree(paths[3], tmp_path / "vanishing")
    weights = describe_weights(path, 6)
    verify = engine._verified_layout

    def verify_then_vanish(weights):
        layout = verify(weights)
        shutil.rmtree(path)
        return layout

    engine._verified_layout = verify_then_vanish
    try:
        with pytest.raises(LoadFailed) as failure:
            await engine.load_weights(weights)
    finally:
        del engine._verified_layout
    assert failure.value.code == "weights_refused"
    assert engine.problem is None
    assert engine.weights.version == 0
    assert is_version((await engine.generate(PROMPT, TOP_K, ids(1), capture=True))[0], 0)


@pytest.mark.parametrize(
    ("mode", "sampling"),
    [("raw_logits", WARM), ("raw_logprobs", WARM), ("processed_logits", TOP_KP)],
    ids=["raw_logits", "raw_logprobs", "processed_logits"],
)
async def test_whatever_vllm_reports_becomes_the_log_prob_as_sampled(paths, mode, sampling):
    from services.rollout.vllm_engine.engine import VllmEngine

    other = VllmEngine(configuration(paths[1], mode, top_k=sampling.top_k, top_p=sampling.top_p), seed=7)
    await other.launch()
    try:
        # A prompt brings sampling parameters of its own, which the configuration never saw.
        for recorded, refused in ((True, mode.startswith("raw")), (False, False)):
            assert (mode in (other.refusal(TOP_K, recorded) or "")) == refused
        assert other.refusal(sampling, True) is None
        samples = await other.generate(PROMPT, sampling, ids(4), capture=True)
    finally:
        await other.close()
    for sample in samples:
        logits, _ = forward(paths[1], [*PROMPT, *sample.token_ids.tolist()])
        np.testing.assert_allclose(sample.logprobs, expected_logprobs(logits, sample, sampling), atol=1e-5, rtol=0)
