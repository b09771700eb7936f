"""Weights from disk into the real vLLM: read, refused, and what is left of the engine when something breaks."""

import asyncio
import errno
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.transport.weight_feed import describe_weights
from services.rollout.engine.protocol import EngineFailed, LoadFailed
from tests.support.rollout.vllm_models import LONG, PROMPT, TOP_K, TOP_KP, begun, ids, is_version
from tests.support.rollout.vllm_reference import expected_logprobs, forward, is_top

pytestmark = pytest.mark.asyncio(loop_scope="session")


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
