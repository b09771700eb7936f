"""The real vLLM's samples against the Hugging Face model."""

import asyncio
import contextlib
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from trivet.v1 import sample_pb2

from services.common.transport.weight_feed import describe_weights
from tests.support.rollout.vllm_models import (
    LAYERS,
    LONG,
    PROMPT,
    TOP,
    TOP_K,
    TOP_KP,
    VOCABULARY,
    begun,
    configuration,
    ids,
    is_version,
)
from tests.support.rollout.vllm_reference import expected_logprobs, forward, is_top, nucleus

pytestmark = pytest.mark.asyncio(loop_scope="session")

PLAIN = sample_pb2.SamplingParameters(temperature=1.0, top_p=1.0, max_tokens=24)
WARM = sample_pb2.SamplingParameters(temperature=0.7, top_p=1.0, max_tokens=24)
TOP_P = sample_pb2.SamplingParameters(temperature=1.0, top_p=0.7, max_tokens=24)


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


async def test_a_seed_gives_the_same_samples_again(whole_prompt_engine):
    # Each prompt fills most of a step: in parts, the second would end the engine.
    long = [10 + i % 40 for i in range(1500)]
    seeded = sample_pb2.SamplingParameters(temperature=1.0, top_p=1.0, max_tokens=8, seed=11)
    assert whole_prompt_engine.refusal(seeded, True) is None
    runs = [await whole_prompt_engine.generate(long, seeded, ids(3), capture=True) for _ in range(2)]
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


@pytest.mark.parametrize(
    ("mode", "sampling"),
    [("raw_logits", WARM), ("raw_logprobs", WARM), ("processed_logits", TOP_KP)],
    ids=["raw_logits", "raw_logprobs", "processed_logits"],
)
async def test_whatever_vllm_reports_becomes_the_log_prob_as_sampled(whole_prompt_engine, paths, mode, sampling):
    async with reporting(
        whole_prompt_engine, configuration(paths[1], mode, top_k=sampling.top_k, top_p=sampling.top_p)
    ) as engine:
        # A prompt brings sampling parameters of its own, which the configuration never saw.
        for recorded, refused in ((True, mode.startswith("raw")), (False, False)):
            assert (mode in (engine.refusal(TOP_K, recorded) or "")) == refused
        assert engine.refusal(sampling, True) is None
        samples = await engine.generate(PROMPT, sampling, ids(4), capture=True)
    for sample in samples:
        logits, _ = forward(paths[1], [*PROMPT, *sample.token_ids.tolist()])
        np.testing.assert_allclose(sample.logprobs, expected_logprobs(logits, sample, sampling), atol=1e-5, rtol=0)


@contextlib.asynccontextmanager
async def reporting(running, config):
    """An engine under `config` over the vLLM that `running` has started, whose sampler reports as `config` says."""
    from services.rollout.vllm_engine.engine import VllmEngine

    mode, own = config.rollout.logprobs_mode, running._config.rollout.logprobs_mode
    engine = VllmEngine(config, seed=7)
    engine._launched, engine._llm = running._launched, running._llm
    engine._open()
    await running._llm.collective_rpc("report_logprobs_as", args=(mode,))
    try:
        yield engine
    finally:
        await running._llm.collective_rpc("report_logprobs_as", args=(own,))
