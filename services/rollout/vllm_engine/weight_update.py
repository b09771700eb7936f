"""One change of weights in a running engine. Knows vLLM's calls, not vLLM."""

import base64
from typing import Any

from trivet.v1 import rollout_pb2

from services.common.errors import InvalidData, Unavailable
from services.rollout.engine.delivery import Delivery
from services.rollout.engine.protocol import EngineFailed, LoadFailed
from services.rollout.vllm_engine.layout import Layout

# torch's names; the worker looks them up there.
DTYPES = {"bfloat16", "float16", "float32", "float64", "int8", "uint8", "int32", "int64"}
# Of ncclGetUniqueId.
UNIQUE_ID_BYTES = 128
# As much as weights.buffer_mib allows.
MAX_BUFFER_BYTES = 4096 * 2**20


class StaleCache(RuntimeError):
    """Keys and values of the old weights are still there."""


async def load(llm: Any, path: str) -> None:
    """Loads the files of `path` into a paused AsyncLLM. Raises whatever vLLM raises."""
    await llm.collective_rpc("trivet_reload", args=(path,))


async def receive(llm: Any, delivery: Delivery) -> None:
    """Loads what the trainer hands over into a paused AsyncLLM.

    Raises LoadFailed while the old weights are whole; after that whatever vLLM raises, Unavailable when the trainer
    gave up and InvalidData for parts that are not what was announced.
    """
    try:
        part = await delivery.next()
    except Unavailable as error:
        raise LoadFailed(error.code, str(error)) from error
    await llm.collective_rpc("start_weight_update")
    while part is not None:
        await delivery.during(llm.collective_rpc("trivet_receive", args=(update_info(delivery, part),)))
        part = await delivery.next()
    if delivery.received != len(delivery.begin.tensors):
        raise InvalidData(
            "transfer_parts", f"{delivery.received} tensors were handed over, expected {len(delivery.begin.tensors)}"
        )
    await llm.collective_rpc("trivet_finish_update")


async def check_reload(llm: Any, path: str) -> None:
    """Reloads the weights that are there already. Raises EngineFailed when that changes them.

    vLLM converts weights for its kernels, and a conversion that a reload forgets shows in no other way.
    """
    before = await llm.compute_weight_checksums()
    await load(llm, path)
    after = await llm.compute_weight_checksums()
    changed = sorted(name for old, new in zip(before, after, strict=True) for name in old if old[name] != new[name])
    if changed:
        raise EngineFailed(
            "reload_inexact", f"reloading the same weights changes {len(changed)} tensors, the first {changed[0]}"
        )


async def relabel(llm: Any, label: str) -> None:
    """Names the weights of a paused AsyncLLM `label`: later tokens carry that version.

    What the old weights computed must not be read under the new ones, neither keys and values nor the routing that
    vLLM keeps with them, so the prefix cache is emptied too. Raises StaleCache where it is not.
    """
    # Pausing empties it, too; this holds for whatever reached it in between.
    if llm.vllm_config.cache_config.enable_prefix_caching and not await llm.reset_prefix_cache(
        reset_running_requests=True
    ):
        raise StaleCache("vLLM did not empty its prefix cache")
    await llm.update_weight_version(label)


async def join(llm: Any, request: rollout_pb2.JoinTransferRequest) -> None:
    """Leaves the previous group and joins the new one. Raises whatever vLLM raises."""
    await llm.collective_rpc("shutdown_weight_transfer_engine")
    await llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info(request)})


def check_join(request: rollout_pb2.JoinTransferRequest) -> None:
    """Raises InvalidData for a group that cannot be formed: waiting for it would cost a restart of the engine."""
    nccl = request.nccl
    if not request.HasField("nccl"):
        return
    if len(nccl.unique_id) != UNIQUE_ID_BYTES:
        raise InvalidData(
            "transfer_group", f"nccl.unique_id has {len(nccl.unique_id)} bytes, expected {UNIQUE_ID_BYTES}"
        )
    if not 1 <= nccl.rank_offset < nccl.world_size:
        raise InvalidData(
            "transfer_group",
            f"nccl.rank_offset is {nccl.rank_offset}, expected 1 to less than nccl.world_size ({nccl.world_size})",
        )
    if not 1 <= nccl.buffer_bytes <= MAX_BUFFER_BYTES:
        raise InvalidData(
            "transfer_group", f"nccl.buffer_bytes is {nccl.buffer_bytes}, expected 1 to {MAX_BUFFER_BYTES}"
        )


def init_info(request: rollout_pb2.JoinTransferRequest) -> dict[str, Any]:
    """The fields of vLLM's NCCLWeightTransferInitInfo or IPCWeightTransferInitInfo."""
    if request.HasField("ipc"):
        return {"packed": True}
    nccl = request.nccl
    return {
        "rank_offset": nccl.rank_offset,
        "world_size": nccl.world_size,
        "nccl_unique_id_b64": base64.b64encode(nccl.unique_id).decode(),
        "packed": True,
        "packed_buffer_size_bytes": nccl.buffer_bytes,
    }


def announced_layout(begin: rollout_pb2.TransferBegin) -> Layout:
    """Raises InvalidData for a tensor that comes twice, or in a dtype that weights do not have."""
    layout: Layout = {}
    for tensor in begin.tensors:
        if tensor.name in layout:
            raise InvalidData("weights_mismatch", f"tensor {tensor.name} is announced twice, expected once")
        if tensor.dtype not in DTYPES:
            raise InvalidData(
                "weights_mismatch", f"tensor {tensor.name} has dtype {tensor.dtype!r}, expected one of {sorted(DTYPES)}"
            )
        layout[tensor.name] = tuple(tensor.shape)
    return layout


def update_info(delivery: Delivery, part: rollout_pb2.TransferPart) -> dict[str, Any]:
    """The fields of vLLM's NCCLWeightTransferUpdateInfo; with a buffer also what `trivet_receive` opens it with.

    Raises InvalidData for parts out of order.
    """
    first, end = part.first, part.first + part.count
    if not part.count or end != delivery.received or end > len(delivery.begin.tensors):
        raise InvalidData(
            "transfer_parts",
            f"tensors [{first}, {end}) came as the next part, expected them to begin at "
            f"{delivery.received - part.count} of {len(delivery.begin.tensors)}",
        )
    tensors = delivery.begin.tensors[first:end]
    info: dict[str, Any] = {
        "names": [tensor.name for tensor in tensors],
        "dtype_names": [tensor.dtype for tensor in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
    }
    if part.HasField("buffer"):
        info["buffer"] = {field.name: getattr(part.buffer, field.name) for field in part.buffer.DESCRIPTOR.fields}
    return info
