"""What vLLM itself captured (model runner V2), as replay data."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt

from services.common.wire.replay_data import CandidateSets
from services.common.wire.tensors import Array
from services.rollout.engine.protocol import EngineFailed


def moe_routing(
    routed_experts: UInt[Array, "positions all_layers experts_per_token"] | None, moe_layers: Sequence[int]
) -> UInt[Array, "positions layers experts_per_token"] | None:
    """vLLM has a slot for every layer, dense ones too: picks those at `moe_layers`. None for a dense model.

    Raises EngineFailed when the model has MoE layers and vLLM returned no routing for them.
    """
    if not moe_layers:
        return None
    if routed_experts is None:
        raise EngineFailed("routing_missing", f"vLLM returned no routing for {len(moe_layers)} MoE layers")
    if routed_experts.ndim != 3 or routed_experts.shape[1] <= max(moe_layers):
        shape = list(routed_experts.shape)
        raise EngineFailed(
            "routing_shape", f"routed_experts has shape {shape}, expected [P + C - 1, more than {max(moe_layers)}, K]"
        )
    return np.ascontiguousarray(routed_experts[:, list(moe_layers)])


def candidate_sets(token_ids: Sequence[Sequence[int]] | None) -> CandidateSets:
    """CSR of vLLM's SamplingMask.token_ids, one list for each sampled token. Raises EngineFailed when there is none."""
    if token_ids is None:
        raise EngineFailed("candidates_missing", "vLLM returned no candidate sets (return_sampling_mask)")
    return CandidateSets(
        np.asarray([len(ids) for ids in token_ids], dtype=np.int32),
        np.concatenate([np.asarray(ids, dtype=np.int32) for ids in token_ids])
        if len(token_ids)
        else np.empty(0, dtype=np.int32),
    )
