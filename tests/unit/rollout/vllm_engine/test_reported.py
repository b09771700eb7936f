from types import SimpleNamespace

import numpy as np
import pytest

from services.rollout.vllm_engine.reported import Reported

VOCABULARY = 7
TOKENS = [2, 5, 0]


def softmax_rows(temperature, excluded=()):
    """Raw logits [3, V], and the log-probs that a sampler at that temperature draws from."""
    logits = np.random.default_rng(3).normal(0, 2, (3, VOCABULARY))
    processed = logits / temperature
    processed[:, list(excluded)] = -np.inf
    return logits, processed, processed - np.log(np.exp(processed).sum(axis=1, keepdims=True))


def flat_of(rows, whole):
    """As vLLM has it: the sampled token first, then the row."""
    flat = SimpleNamespace(start_indices=[], end_indices=[], logprobs=[])
    for token, row in zip(TOKENS, rows, strict=True):
        flat.start_indices.append(len(flat.logprobs))
        flat.logprobs += [row[token], *(row if whole else [])]
        flat.end_indices.append(len(flat.logprobs))
    return flat


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits", "raw_logprobs", "raw_logits"])
def test_every_mode_gives_the_log_prob_as_sampled(mode, temperature):
    logits, processed, expected = softmax_rows(temperature)
    rows = {
        "processed_logprobs": expected,
        "processed_logits": processed,
        "raw_logits": logits,
        "raw_logprobs": logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)),
    }[mode]
    reported = Reported(mode, temperature)
    found = reported.as_sampled(flat_of(rows, reported.whole_rows))
    np.testing.assert_allclose(found, [row[token] for row, token in zip(expected, TOKENS, strict=True)], rtol=1e-6)
    assert found.dtype == np.float32


def test_processed_logits_leave_excluded_tokens_out():
    _, processed, expected = softmax_rows(0.7, excluded=(1, 3))
    found = Reported("processed_logits", 0.7).as_sampled(flat_of(processed, whole=True))
    np.testing.assert_allclose(found, [row[token] for row, token in zip(expected, TOKENS, strict=True)], rtol=1e-6)


@pytest.mark.parametrize(
    ("mode", "temperature", "logprobs"),
    [
        ("processed_logprobs", 0.7, 0),
        ("raw_logprobs", 1.0, 0),
        ("raw_logprobs", 0.0, 0),
        ("raw_logprobs", 0.7, -1),
        ("raw_logits", 1.0, -1),
        ("processed_logits", 1.0, -1),
    ],
)
def test_the_whole_vocabulary_is_asked_for_only_where_it_is_needed(mode, temperature, logprobs):
    assert Reported(mode, temperature).logprobs == logprobs
