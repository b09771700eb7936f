"""What vLLM's samples of the small model should be, by Hugging Face's model."""

import functools

import numpy as np
import torch
from transformers import Qwen3MoeForCausalLM

from tests.support.rollout.vllm_models import PROMPT, TOP


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
