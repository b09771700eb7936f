"""The replay data of one sample: which experts and which candidates the sampler used."""

from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError
from jaxtyping import Int32, UInt
from trivet.v1 import tensor_pb2

from services.common.errors import InvalidData
from services.common.wire.tensors import MAX_TENSOR_BYTES, Array, decode_tensor, encode_tensor


@dataclass(frozen=True)
class CandidateSets:
    """Ragged rows: position i may have drawn token_ids[sum(counts[:i]) : sum(counts[:i + 1])]."""

    counts: Int32[Array, "completion"]
    token_ids: Int32[Array, "candidates"]


@dataclass(frozen=True)
class Replay:
    """Routing is absent for a dense model, candidates are absent where the whole vocabulary was allowed."""

    routing: UInt[Array, "positions layers experts_per_token"] | None = None
    candidates: CandidateSets | None = None


def encode_replay(sample_id: str, replay: Replay) -> bytes:
    message = tensor_pb2.ReplayData(sample_id=sample_id)
    if replay.routing is not None:
        message.routing.CopyFrom(encode_tensor(replay.routing))
    if replay.candidates is not None:
        message.candidate_counts.CopyFrom(encode_tensor(replay.candidates.counts))
        message.candidate_ids.CopyFrom(encode_tensor(replay.candidates.token_ids))
    return message.SerializeToString()


def decode_replay(
    data: bytes,
    *,
    sample_id: str,
    prompt_length: int,
    token_ids: Int32[Array, "completion"],
    max_bytes: int = MAX_TENSOR_BYTES,
) -> Replay:
    """Raises InvalidData unless rows, types and sampled tokens agree with the sample.

    No tensor may take more than `max_bytes` once it is decompressed.
    Bounds that only the model knows (experts, layers, vocabulary) are checked by `check_model_bounds`.
    """
    try:
        message = tensor_pb2.ReplayData.FromString(data)
    except DecodeError as error:
        raise InvalidData("blob_corrupt", f"replay of {sample_id} is not a ReplayData message ({error})") from error
    if message.sample_id != sample_id:
        raise InvalidData("blob_mismatch", f"replay.sample_id is {message.sample_id!r}, expected {sample_id!r}")
    routing = None
    if message.HasField("routing"):
        routing = decode_tensor(message.routing, "replay.routing", max_bytes)
        _check_routing(routing, prompt_length + len(token_ids) - 1)
    candidates = None
    if message.HasField("candidate_counts"):
        counts = decode_tensor(message.candidate_counts, "replay.candidate_counts", max_bytes)
        ids = decode_tensor(message.candidate_ids, "replay.candidate_ids", max_bytes)
        _check_candidates(counts, ids, token_ids)
        candidates = CandidateSets(counts, ids)
    return Replay(routing, candidates)


def _check_routing(routing: Array, rows: int) -> None:
    if routing.dtype.name not in {"uint8", "uint16"} or routing.ndim != 3:
        raise InvalidData(
            "routing_shape",
            f"replay.routing is {routing.dtype.name} {list(routing.shape)}, expected uint8 or uint16 [{rows}, L, K]",
        )
    if routing.shape[0] != rows:
        raise InvalidData("routing_rows", f"replay.routing has {routing.shape[0]} rows, expected {rows} (P + C - 1)")
    # Any two of a row are some distance apart: comparing at each distance takes a small part of what sorting does.
    if any((routing[:, :, apart:] == routing[:, :, :-apart]).any() for apart in range(1, routing.shape[2])):
        raise InvalidData("routing_duplicate", "replay.routing names one expert twice for a token")


def _check_candidates(counts: Array, ids: Array, token_ids: Array) -> None:
    for field, array in (("candidate_counts", counts), ("candidate_ids", ids)):
        if array.dtype.name != "int32" or array.ndim != 1:
            raise InvalidData(
                "candidates_shape", f"replay.{field} is {array.dtype.name} {list(array.shape)}, expected int32 [n]"
            )
    if len(counts) != len(token_ids):
        raise InvalidData(
            "candidates_rows", f"replay.candidate_counts has {len(counts)} rows, expected {len(token_ids)} (C)"
        )
    if bool((counts < 1).any()) or int(counts.sum(dtype=np.int64)) != len(ids):
        raise InvalidData(
            "candidates_counts",
            f"replay.candidate_counts must be positive and sum to {len(ids)}, the length of candidate_ids",
        )
    row_of_id = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    keys = np.sort((row_of_id << 32) | ids)
    if bool((keys[1:] == keys[:-1]).any()):
        raise InvalidData("candidate_duplicate", "replay.candidate_ids names one token twice at a position")
    found = np.zeros(len(counts), dtype=bool)
    found[row_of_id[ids == np.asarray(token_ids)[row_of_id]]] = True
    if not found.all():
        position = int(np.flatnonzero(~found)[0])
        raise InvalidData(
            "token_outside_candidates",
            f"token {int(token_ids[position])} at position {position} is not among its candidates",
        )


def check_model_bounds(
    replay: Replay, *, moe_layers: int, experts_per_token: int, experts: int, vocabulary: int
) -> None:
    """Raises InvalidData where the replay data cannot belong to this model."""
    if replay.routing is not None:
        shape = (moe_layers, experts_per_token)
        if replay.routing.shape[1:] != shape:
            raise InvalidData(
                "routing_shape", f"replay.routing has [L, K] = {list(replay.routing.shape[1:])}, expected {list(shape)}"
            )
        if replay.routing.size and int(replay.routing.max()) >= experts:
            raise InvalidData(
                "expert_out_of_range",
                f"replay.routing names expert {int(replay.routing.max())}, expected less than {experts}",
            )
    if replay.candidates is not None and replay.candidates.token_ids.size:
        low, high = int(replay.candidates.token_ids.min()), int(replay.candidates.token_ids.max())
        if low < 0 or high >= vocabulary:
            raise InvalidData(
                "candidate_out_of_range", f"replay.candidate_ids span {low} to {high}, expected 0 to {vocabulary - 1}"
            )
