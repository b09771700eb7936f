"""Channels from the trainer's memory to the rollouts': vLLM's weight-transfer engines are at the other end."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor
from trivet.v1 import rollout_pb2, weights_pb2

from services.common.errors import Unavailable
from services.trainer.weights.members import GroupUpdate, Joining, Member, Request
from services.trainer.weights.parts import Part, broadcast_parts, buffer_parts, fill

Tensors = Sequence[weights_pb2.TensorDescription]


class Channel(Protocol):
    """To the members of one group."""

    collective: bool

    def join(self, group: str, members: Sequence[Member], seconds: float) -> None:
        """Raises Unavailable if the group is not formed in time."""

    def send(self, tensors: Iterator[tuple[str, Tensor]], update: GroupUpdate) -> None:
        """All members, begun and ready, have loaded everything when it returns. Raises Unavailable and InvalidData."""

    def close(self) -> None: ...


class Communicator(Protocol):
    def broadcast(self, buffer: Tensor) -> None: ...

    def synchronize(self) -> None: ...

    def abort(self) -> None: ...


# Of a unique id and a world size; blocks until all have come.
OpenCommunicator = Callable[[bytes, int], Communicator]


class BroadcastChannel:
    """One broadcast reaches all. A failure hangs the others, so it ends the group."""

    collective = True

    def __init__(
        self,
        tensors: Tensors,
        buffer_bytes: int,
        device: torch.device,
        *,
        new_unique_id: Callable[[], bytes],
        open_communicator: OpenCommunicator,
    ) -> None:
        self._tensors, self._buffer_bytes, self._device = tensors, buffer_bytes, device
        self._parts = broadcast_parts(tensors, buffer_bytes)
        self._new_unique_id, self._open = new_unique_id, open_communicator
        self._communicator: Communicator | None = None

    def join(self, group: str, members: Sequence[Member], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        unique_id, world_size = self._new_unique_id(), 1 + sum(member.workers for member in members)
        rank, joining = 1, []
        for member in members:
            nccl = rollout_pb2.NcclTransfer(
                unique_id=unique_id, world_size=world_size, rank_offset=rank, buffer_bytes=self._buffer_bytes
            )
            joining.append(member.join(rollout_pb2.JoinTransferRequest(group=group, nccl=nccl), seconds))
            rank += member.workers
        try:
            self._communicator = _in_time(lambda: self._open(unique_id, world_size), joining, deadline)
            for each in joining:
                each.wait()
        except Unavailable:
            for each in joining:
                each.cancel()
            self.close()
            raise

    def send(self, tensors: Iterator[tuple[str, Tensor]], update: GroupUpdate) -> None:
        communicator = self._communicator
        if communicator is None:
            raise Unavailable("aborted", "the transfer group was closed")
        update.if_one_fails(communicator.abort)
        update.send(lambda _: Request(part=rollout_pb2.TransferPart(first=0, count=len(self._tensors))))
        buffer = torch.empty(max(part.bytes for part in self._parts), dtype=torch.uint8, device=self._device)
        for part in self._parts:
            # On one stream: the next part is copied into the buffer only after this one left it.
            communicator.broadcast(fill(buffer, part, tensors, self._tensors))
        communicator.synchronize()
        update.expect(rollout_pb2.TRANSFER_STAGE_LOADED)

    def close(self) -> None:
        if self._communicator is not None:
            self._communicator.abort()
            self._communicator = None


class BufferChannel:
    """One buffer that members on the same GPU open; it is filled again when all have read it."""

    collective = False

    def __init__(
        self,
        tensors: Tensors,
        buffer_bytes: int,
        device: torch.device,
        *,
        export: Callable[[Tensor], rollout_pb2.CudaBuffer],
        synchronize: Callable[[], None],
        collect: Callable[[], None],
    ) -> None:
        """`collect` frees buffers that no other process reads any more."""
        self._tensors, self._device = tensors, device
        self._parts = buffer_parts(tensors, buffer_bytes)
        self._export, self._synchronize, self._collect = export, synchronize, collect

    def join(self, group: str, members: Sequence[Member], seconds: float) -> None:
        request = rollout_pb2.JoinTransferRequest(group=group, ipc=rollout_pb2.IpcTransfer())
        for joining in [member.join(request, seconds) for member in members]:
            joining.wait()

    def send(self, tensors: Iterator[tuple[str, Tensor]], update: GroupUpdate) -> None:
        # Of the version before.
        self._collect()
        buffer = torch.empty(max(part.bytes for part in self._parts), dtype=torch.uint8, device=self._device)
        # torch counts one reader for each export.
        exported = {member.name: self._export(buffer) for member in update.members}
        for part in self._parts:
            fill(buffer, part, tensors, self._tensors)
            self._synchronize()
            update.send(lambda member, part=part: _buffer_request(part, exported[member.name]))  # type: ignore[misc]
            update.expect(rollout_pb2.TRANSFER_STAGE_LOADED)

    def close(self) -> None:
        """Nothing is held between two versions."""


def _buffer_request(part: Part, buffer: rollout_pb2.CudaBuffer) -> Request:
    return Request(part=rollout_pb2.TransferPart(first=part.first, count=part.count, buffer=buffer))


def _in_time(opening: Callable[[], Communicator], joining: Sequence[Joining], deadline: float) -> Communicator:
    """What `opening` returns. Raises Unavailable when a member cannot join or the time is up.

    A meeting in NCCL cannot be called off: then its thread is left behind, waiting.
    """
    opened: Future[Communicator] = Future()
    changed = threading.Event()

    def run() -> None:
        try:
            opened.set_result(opening())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            opened.set_exception(error)

    opened.add_done_callback(lambda _: changed.set())
    for each in joining:
        each.then(changed.set)
    threading.Thread(target=run, name="transfer-group", daemon=True).start()
    try:
        while not opened.done():
            changed.clear()
            for each in joining:
                each.check()
            if not opened.done() and not changed.wait(max(0.0, deadline - time.monotonic())):
                raise Unavailable("timeout", "the rollouts did not meet the trainer in time")
    except Unavailable:
        opened.add_done_callback(_abandon)
        raise
    return opened.result()


def _abandon(opened: "Future[Communicator]") -> None:
    if opened.exception() is None:
        opened.result().abort()


def nccl_channel(tensors: Tensors, buffer_bytes: int, device: torch.device) -> BroadcastChannel:
    """Raises OSError where there is no NCCL."""
    from services.trainer.weights import nccl

    library = nccl.load_library()
    return BroadcastChannel(
        tensors,
        buffer_bytes,
        device,
        new_unique_id=lambda: nccl.new_unique_id(library),
        open_communicator=lambda unique_id, world_size: nccl.NcclCommunicator(library, unique_id, world_size, device),
    )


def ipc_channel(tensors: Tensors, buffer_bytes: int, device: torch.device) -> BufferChannel:
    return BufferChannel(
        tensors,
        buffer_bytes,
        device,
        export=export_cuda_buffer,
        synchronize=lambda: torch.cuda.current_stream(device).synchronize(),
        collect=torch.cuda.ipc_collect,
    )


def device_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def export_cuda_buffer(buffer: Tensor) -> rollout_pb2.CudaBuffer:
    from torch.multiprocessing.reductions import reduce_tensor

    return cuda_buffer(reduce_tensor(buffer)[1], device_uuid(buffer.device))  # type: ignore[no-untyped-call]


def cuda_buffer(arguments: Sequence[Any], device: str) -> rollout_pb2.CudaBuffer:
    """Of the arguments of torch.multiprocessing.reductions.rebuild_cuda_tensor."""
    (_, size, _, _, _, _, index, handle, storage_size, storage_offset, _, counter, counter_offset, event, sync) = (
        arguments
    )
    return rollout_pb2.CudaBuffer(
        device=device,
        device_index=index,
        size=size[0],
        storage_handle=handle,
        storage_size=storage_size,
        storage_offset=storage_offset,
        reference_counter_handle=counter,
        reference_counter_offset=counter_offset,
        event_handle=event,
        event_sync_required=sync,
    )
