"""vLLM's CompletionOutput as a sample. Reads its fields, and so needs no vllm to be tested."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from trivet.v1 import weights_pb2

from services.common.wire.replay_data import Replay
from services.rollout.capture.native import candidate_sets, moe_routing
from services.rollout.engine.protocol import EngineSample, WeightSpan
from services.rollout.vllm_engine.reported import Reported


def sample_from(output: Any, replay: Replay | None, tokenizer: Any, reported: Reported) -> EngineSample:
    token_ids = list(output.token_ids)
    return EngineSample(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        logprobs=reported.as_sampled(output.logprobs),
        finish_reason=output.finish_reason,
        text=tokenizer.decode(token_ids, skip_special_tokens=True),
        spans=tuple(read_label(span.version, span.start, span.end) for span in output.weight_versions or []),
        replay=replay,
    )


def native_replay(output: Any, moe_layers: Sequence[int], *, candidates: bool) -> Replay:
    """Raises EngineFailed when vLLM did not return what it was asked for."""
    mask = output.sampling_mask.token_ids if output.sampling_mask is not None else None
    return Replay(moe_routing(output.routed_experts, moe_layers), candidate_sets(mask) if candidates else None)


def weight_label(weights: weights_pb2.WeightVersion) -> str:
    """What vLLM calls the weights: two publications of one version differ by their fingerprint."""
    return f"{weights.version}:{weights.fingerprint}"


def read_label(label: str, start: int, end: int) -> WeightSpan:
    version, _, fingerprint = label.partition(":")
    return WeightSpan(int(version), fingerprint, start, end)
