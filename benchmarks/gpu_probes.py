"""What gpu_check tries, each in a process of its own: returns what it saw, raises with the reason where it fails."""

import asyncio
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from benchmarks.probe_parts import (
    PROMPT,
    TOP_K,
    Place,
    Skipped,
    configuration,
    count_mixed,
    sampling_parameters,
    under_way,
)
from benchmarks.transfer_probe import hands_over
from services.common.wire.replay_data import CandidateSets, Replay

Capture = Literal["native", "worker_extension"]
LENGTHS = ((4, 9), (7, 3), (5, 16), (9, 6))
# Largest |log-prob| apart between two attentions in bfloat16, in nats.
FLASH_TOLERANCE = 0.1
FLASH_COSINE = 0.99


def torch_sees(place: Place) -> str:
    if place.device == "cpu":
        return f"torch {torch.__version__} on the CPU"
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no CUDA device")
    left, right = torch.randn(2, 256, 256, device="cuda", dtype=torch.bfloat16)
    product, exact = (left @ right).double().cpu(), left.double().cpu() @ right.double().cpu()
    error = float((product - exact).abs().max() / exact.abs().max())
    if not error < 0.01:
        raise RuntimeError(f"a bfloat16 product is off by {error:.3g} of its largest entry, expected under 0.01")
    name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    return f"torch {torch.__version__}, {name}, {memory / 2**30:.0f} GiB"


def trains(place: Place, stage: int, dtype: str) -> str:
    """One policy-gradient step with routing and candidates replayed, through DeepSpeed."""
    from services.trainer.batch.packing import pack
    from services.trainer.engine.deepspeed_engine import open_engine

    engine = open_engine(configuration(place, dtype, stage=stage))
    try:
        batch = pack(_samples(engine.facts.moe_layers, engine.facts.experts, engine.facts.experts_per_token))
        before = engine.logprobs(batch.to(engine.device)).logprobs.float()
        output = engine.forward(batch)
        engine.backward(-output.logprobs.mean(), last=True)
        result = engine.step()
        after = engine.logprobs(batch.to(engine.device)).logprobs.float()
        gain = float((after - before).mean())
        if not result.applied or not gain > 0:
            raise RuntimeError(f"step applied: {result.applied}, mean log-prob moved by {gain:.3g}, expected upwards")
        return f"gradient norm {result.grad_norm:.3g}, mean log-prob {gain:+.3g} on {engine.device}"
    finally:
        engine.close()


def flash_equals_sdpa(place: Place, attention: Literal["varlen", "flash_attention_2"]) -> str:
    """Packed samples under a flash kernel against the same samples one by one under sdpa, forward and backward."""
    from services.trainer.batch.packing import pack
    from services.trainer.model.policy import load_policy

    if place.device == "cpu":
        raise Skipped("flash attention needs a GPU")
    if attention == "flash_attention_2" and importlib.util.find_spec("flash_attn") is None:
        raise Skipped("the package flash-attn is not installed")
    device = torch.device("cuda", 0)
    flash, sdpa = (
        load_policy(str(place.model), dtype="bfloat16", attention=kernel, device=device).to(device).eval()
        for kernel in (attention, "sdpa")
    )
    if not flash.facts.packs:
        raise RuntimeError(f"packed samples see each other under {attention}")
    samples = _samples(flash.facts.moe_layers, flash.facts.experts, flash.facts.experts_per_token)
    packed = flash(pack(samples).to(device))[0]
    alone = torch.cat([sdpa(pack([one]).to(device))[0] for one in samples])
    apart = float((packed - alone).abs().max())
    if not apart < FLASH_TOLERANCE:
        raise RuntimeError(f"log-probs are up to {apart:.3g} nats apart, expected under {FLASH_TOLERANCE}")
    gradients = []
    for policy, logprobs in ((flash, packed), (sdpa, alone)):
        logprobs.mean().backward()
        gradients.append(torch.cat([p.grad.flatten().float() for p in policy.parameters() if p.grad is not None]))
    cosine = float(torch.nn.functional.cosine_similarity(gradients[0], gradients[1], dim=0))
    if not cosine > FLASH_COSINE:
        raise RuntimeError(f"the gradients have a cosine of {cosine:.4f}, expected over {FLASH_COSINE}")
    return f"log-probs at most {apart:.2g} nats apart over {len(packed)} tokens, cosine of the gradients {cosine:.5f}"


def samples_with(place: Place, capture: Capture) -> str:
    """A start, candidates under top_k, an update in flight, and weights that a reload leaves as they were."""
    from services.rollout.vllm_engine.environment import set_defaults

    if capture == "native" and place.device == "cpu":
        raise Skipped("vLLM captures natively on GPUs only")
    set_defaults()
    return asyncio.run(_engine(place, capture))


async def _engine(place: Place, capture: Capture) -> str:
    from services.common.transport.weight_feed import describe_weights
    from services.rollout.vllm_engine.engine import VllmEngine

    # Its start reloads the same weights and compares checksums: it fails where they differ.
    engine = VllmEngine(configuration(place, _dtype(place), rollout={"capture": capture, "engine": _vllm(place)}), 7)
    await engine.launch()
    try:
        if engine.capture != capture:
            raise RuntimeError(f"capture is {engine.capture}, expected {capture}")
        (top_k, top_p) = [
            await engine.generate(PROMPT, sampling, [f"{name}/{i}" for i in range(4)], capture=True)
            for name, sampling in (("k", sampling_parameters(top_k=TOP_K)), ("p", sampling_parameters(top_p=0.9)))
        ]
        for sample in top_k:
            _check_candidates(sample, at_most=TOP_K if place.device == "cuda" else None)
        for sample in top_p:
            _check_candidates(sample, at_most=None)
        spans = await _update_in_flight(engine, describe_weights(place.directory / "other", 1))
        return f"candidate sets of top_k and top_p, two spans in {spans} of 8 samples, checksums equal after a reload"
    finally:
        await engine.close()


async def _update_in_flight(engine: Any, weights: Any) -> int:
    samples = await under_way(engine)
    await engine.load_weights(weights)
    return count_mixed(await samples)


def _check_candidates(sample: Any, *, at_most: int | None) -> None:
    sets, offset = sample.replay.candidates, 0
    for token, count in zip(sample.token_ids, sets.counts, strict=True):
        allowed = sets.token_ids[offset : offset + count]
        offset += count
        if token not in allowed:
            raise RuntimeError(f"token {token} is not among its {count} candidates")
        # Ties at the cutoff are captured too.
        if at_most is not None and not 1 <= count <= at_most + 4:
            raise RuntimeError(f"{count} candidates under top_k {at_most}")
    if sample.replay.routing is None:
        raise RuntimeError("no routing was captured")


def _dtype(place: Place) -> str:
    return "bfloat16" if place.device == "cuda" else "float32"


def _vllm(place: Place) -> dict[str, Any]:
    return {"gpu_memory_utilization": 0.3} if place.device == "cuda" else {}


def _samples(layers: int, experts: int, chosen: int) -> list[Any]:
    from services.trainer.batch.samples import TrainSample

    random = np.random.default_rng(3)
    found = []
    for index, (prompt, completion) in enumerate(LENGTHS):
        tokens = random.integers(10, 100, completion, dtype=np.int32)
        routing = np.argsort(random.random((prompt + completion - 1, layers, experts)), axis=2)[:, :, :chosen]
        others = np.stack([np.unique(np.append(random.choice(np.arange(100, 200), 8, False), t)) for t in tokens])
        found.append(
            TrainSample(
                sample_id=f"sample-{index}",
                prompt_token_ids=random.integers(10, 100, prompt, dtype=np.int32),
                token_ids=tokens,
                rollout_logprobs=-random.random(completion).astype(np.float32),
                replay=Replay(
                    routing.astype(np.uint8),
                    CandidateSets(np.full(completion, others.shape[1], np.int32), others.reshape(-1).astype(np.int32)),
                ),
                advantage=1.0,
                temperature=1.0,
            )
        )
    return found


PROBES: dict[str, Callable[[Place], str]] = {
    "torch": torch_sees,
    **{
        f"trainer-zero{stage}-{dtype}": partial(trains, stage=stage, dtype=dtype)
        for stage in (1, 3)
        for dtype in ("float32", "bfloat16")
    },
    "attention-varlen": partial(flash_equals_sdpa, attention="varlen"),
    "attention-flash-attention-2": partial(flash_equals_sdpa, attention="flash_attention_2"),
    "rollout-native": partial(samples_with, capture="native"),
    "rollout-worker-extension": partial(samples_with, capture="worker_extension"),
    "transfer-ipc": partial(hands_over, transfer="ipc"),
    "transfer-nccl": partial(hands_over, transfer="nccl"),
}
