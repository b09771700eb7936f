from trivet.v1 import sample_pb2 as _sample_pb2
from trivet.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TransferStage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSFER_STAGE_UNSPECIFIED: _ClassVar[TransferStage]
    TRANSFER_STAGE_READY: _ClassVar[TransferStage]
    TRANSFER_STAGE_LOADED: _ClassVar[TransferStage]
    TRANSFER_STAGE_FINISHED: _ClassVar[TransferStage]
TRANSFER_STAGE_UNSPECIFIED: TransferStage
TRANSFER_STAGE_READY: TransferStage
TRANSFER_STAGE_LOADED: TransferStage
TRANSFER_STAGE_FINISHED: TransferStage

class GenerateRequest(_message.Message):
    __slots__ = ("prompt",)
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    prompt: _sample_pb2.Prompt
    def __init__(self, prompt: _Optional[_Union[_sample_pb2.Prompt, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("group", "replay")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    group: _sample_pb2.Group
    replay: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, group: _Optional[_Union[_sample_pb2.Group, _Mapping]] = ..., replay: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LoadWeightsRequest(_message.Message):
    __slots__ = ("weights",)
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    weights: _weights_pb2.WeightVersion
    def __init__(self, weights: _Optional[_Union[_weights_pb2.WeightVersion, _Mapping]] = ...) -> None: ...

class LoadWeightsResponse(_message.Message):
    __slots__ = ("version", "seconds")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    version: int
    seconds: float
    def __init__(self, version: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class JoinTransferRequest(_message.Message):
    __slots__ = ("group", "nccl", "ipc")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    NCCL_FIELD_NUMBER: _ClassVar[int]
    IPC_FIELD_NUMBER: _ClassVar[int]
    group: str
    nccl: NcclTransfer
    ipc: IpcTransfer
    def __init__(self, group: _Optional[str] = ..., nccl: _Optional[_Union[NcclTransfer, _Mapping]] = ..., ipc: _Optional[_Union[IpcTransfer, _Mapping]] = ...) -> None: ...

class NcclTransfer(_message.Message):
    __slots__ = ("unique_id", "world_size", "rank_offset", "buffer_bytes")
    UNIQUE_ID_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANK_OFFSET_FIELD_NUMBER: _ClassVar[int]
    BUFFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    unique_id: bytes
    world_size: int
    rank_offset: int
    buffer_bytes: int
    def __init__(self, unique_id: _Optional[bytes] = ..., world_size: _Optional[int] = ..., rank_offset: _Optional[int] = ..., buffer_bytes: _Optional[int] = ...) -> None: ...

class IpcTransfer(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JoinTransferResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("begin", "part", "finish")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    begin: TransferBegin
    part: TransferPart
    finish: TransferFinish
    def __init__(self, begin: _Optional[_Union[TransferBegin, _Mapping]] = ..., part: _Optional[_Union[TransferPart, _Mapping]] = ..., finish: _Optional[_Union[TransferFinish, _Mapping]] = ...) -> None: ...

class TransferBegin(_message.Message):
    __slots__ = ("group", "weights", "tensors")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    group: str
    weights: _weights_pb2.WeightVersion
    tensors: _containers.RepeatedCompositeFieldContainer[_weights_pb2.TensorDescription]
    def __init__(self, group: _Optional[str] = ..., weights: _Optional[_Union[_weights_pb2.WeightVersion, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[_weights_pb2.TensorDescription, _Mapping]]] = ...) -> None: ...

class TransferPart(_message.Message):
    __slots__ = ("first", "count", "buffer")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    buffer: CudaBuffer
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ..., buffer: _Optional[_Union[CudaBuffer, _Mapping]] = ...) -> None: ...

class TransferFinish(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("stage", "seconds")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    stage: TransferStage
    seconds: float
    def __init__(self, stage: _Optional[_Union[TransferStage, str]] = ..., seconds: _Optional[float] = ...) -> None: ...

class CudaBuffer(_message.Message):
    __slots__ = ("device", "device_index", "size", "storage_handle", "storage_size", "storage_offset", "reference_counter_handle", "reference_counter_offset", "event_handle", "event_sync_required")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_INDEX_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    STORAGE_HANDLE_FIELD_NUMBER: _ClassVar[int]
    STORAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    STORAGE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_COUNTER_HANDLE_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_COUNTER_OFFSET_FIELD_NUMBER: _ClassVar[int]
    EVENT_HANDLE_FIELD_NUMBER: _ClassVar[int]
    EVENT_SYNC_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    device: str
    device_index: int
    size: int
    storage_handle: bytes
    storage_size: int
    storage_offset: int
    reference_counter_handle: bytes
    reference_counter_offset: int
    event_handle: bytes
    event_sync_required: bool
    def __init__(self, device: _Optional[str] = ..., device_index: _Optional[int] = ..., size: _Optional[int] = ..., storage_handle: _Optional[bytes] = ..., storage_size: _Optional[int] = ..., storage_offset: _Optional[int] = ..., reference_counter_handle: _Optional[bytes] = ..., reference_counter_offset: _Optional[int] = ..., event_handle: _Optional[bytes] = ..., event_sync_required: _Optional[bool] = ...) -> None: ...

class RegisteredRollout(_message.Message):
    __slots__ = ("rollout_id", "address", "engine", "devices")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    address: str
    engine: str
    devices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rollout_id: _Optional[str] = ..., address: _Optional[str] = ..., engine: _Optional[str] = ..., devices: _Optional[_Iterable[str]] = ...) -> None: ...

class RolloutServicePauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RolloutServicePauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RolloutServiceResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RolloutServiceResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RolloutServiceGetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RolloutServiceGetStatusResponse(_message.Message):
    __slots__ = ("rollout_id", "paused", "version", "fingerprint", "running_groups", "groups", "samples", "tokens", "tokens_per_second", "load_error", "engine")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_GROUPS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LOAD_ERROR_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    rollout_id: str
    paused: bool
    version: int
    fingerprint: str
    running_groups: int
    groups: int
    samples: int
    tokens: int
    tokens_per_second: float
    load_error: str
    engine: str
    def __init__(self, rollout_id: _Optional[str] = ..., paused: _Optional[bool] = ..., version: _Optional[int] = ..., fingerprint: _Optional[str] = ..., running_groups: _Optional[int] = ..., groups: _Optional[int] = ..., samples: _Optional[int] = ..., tokens: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., load_error: _Optional[str] = ..., engine: _Optional[str] = ...) -> None: ...
