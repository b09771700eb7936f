from types import SimpleNamespace

import pytest
from trivet.v1 import sample_pb2

from services.common.config import parse_config
from services.rollout.vllm_engine.limits import candidate_refusal, seed_refusal, truncates

TOP_K = sample_pb2.SamplingParameters(temperature=1.0, top_k=5, top_p=1.0, max_tokens=4)
PLAIN = sample_pb2.SamplingParameters(temperature=1.0, top_k=0, top_p=1.0, max_tokens=4)


def scheduler(**changes):
    """vLLM's defaults on CPUs, but for what a test changes."""
    return SimpleNamespace(
        **{
            "enable_chunked_prefill": True,
            "long_prefill_token_threshold": 0,
            "max_num_batched_tokens": 2048,
            "max_num_scheduled_tokens": None,
            "max_num_seqs": 128,
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, True),
        ({"enable_chunked_prefill": False}, False),
        ({"enable_chunked_prefill": False, "long_prefill_token_threshold": 16}, True),
        ({"max_num_seqs": 32}, False),
        ({"max_num_seqs": 33}, True),
        ({"max_num_seqs": 32, "long_prefill_token_threshold": 16}, True),
        ({"max_num_seqs": 32, "max_num_scheduled_tokens": 2047}, True),
    ],
)
def test_a_seed_is_refused_on_cpus_where_a_prompt_may_be_prefilled_in_parts(changes, refused):
    reason = seed_refusal(scheduler(**changes), 64, cpu=True)
    assert (reason is not None) == refused
    assert reason is None or "enable_chunked_prefill" in reason
    assert seed_refusal(scheduler(**changes), 64, cpu=False) is None


@pytest.mark.parametrize(
    ("mode", "capture", "trained_with", "refused"),
    [
        ("processed_logprobs", "worker_extension", {}, None),
        ("processed_logprobs", "native", {"top_k": 5}, None),
        ("processed_logprobs", "native", {}, "without candidate capture"),
        ("raw_logprobs", "worker_extension", {}, "raw_logprobs"),
    ],
)
def test_a_truncating_sample_needs_its_candidates(mode, capture, trained_with, refused):
    config = parse_config(
        {
            "run": {"name": "test"},
            "model": {"path": "models/tiny"},
            "data": {"train": {"kind": "jsonl", "path": "a.jsonl"}},
            "sampling": trained_with,
            "reward": {"scorers": [{"name": "exact_match"}]},
            "rollout": {"logprobs_mode": mode},
        }
    )
    reason = candidate_refusal(TOP_K, captured=True, config=config, capture=capture)
    assert (reason is None) if refused is None else (refused in reason)
    # Evaluation captures nothing, and without truncation there is no set.
    assert candidate_refusal(TOP_K, captured=False, config=config, capture=capture) is None
    assert candidate_refusal(PLAIN, captured=True, config=config, capture=capture) is None


def test_greedy_does_not_truncate():
    greedy = sample_pb2.SamplingParameters(temperature=0.0, top_k=5, top_p=0.9, max_tokens=4)
    assert truncates(TOP_K)
    assert not truncates(PLAIN)
    assert not truncates(greedy)
