"""What a running engine cannot sample exactly, or not at all. Knows vLLM's names, not vLLM."""

from typing import Any

from trivet.v1 import sample_pb2

from services.common.config import Config
from services.rollout.vllm_engine.arguments import Capture


def truncates(sampling: sample_pb2.SamplingParameters) -> bool:
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)


def candidate_refusal(
    sampling: sample_pb2.SamplingParameters, *, captured: bool, config: Config, capture: Capture
) -> str | None:
    """Why the candidate set of such a sample could not be captured; None if it can be, or need not be."""
    if not captured or not truncates(sampling):
        return None
    if (mode := config.rollout.logprobs_mode).startswith("raw"):
        return f"top_k or top_p truncates, but rollout.logprobs_mode {mode} does not show what was excluded"
    if capture == "native" and not config.sampling.truncates:
        return "top_k or top_p truncates, but the engine runs without candidate capture (config: sampling)"
    return None


def seed_refusal(scheduler: Any, max_length: int, *, cpu: bool) -> str | None:
    """Why a seed is refused, None where it is taken. `scheduler` is vLLM's SchedulerConfig.

    A seeded request whose prompt is prefilled in parts ends the whole engine on CPUs: after each part vLLM winds the
    request's generator back, which only a CUDA generator can. That goes for every prompt that may find too little room
    in a step, so that it depends on what else is sampled.
    """
    if not cpu:
        return None
    # Nobody has to share a step that holds every request at full length.
    room = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
    roomy = room >= scheduler.max_num_seqs * max_length
    if not scheduler.long_prefill_token_threshold and (roomy or not scheduler.enable_chunked_prefill):
        return None
    return (
        "sampling.seed is set, expected none: on CPUs vLLM fails on a seeded prompt that is prefilled in parts "
        "(rollout.engine.enable_chunked_prefill false and long_prefill_token_threshold 0 rule that out)"
    )
