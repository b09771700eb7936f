from trivet.v1 import sample_pb2 as _sample_pb2
from trivet.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
    __slots__ = ("rollout_id", "paused", "version", "fingerprint", "running_groups", "groups", "samples", "tokens", "tokens_per_second", "load_error")
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
    def __init__(self, rollout_id: _Optional[str] = ..., paused: _Optional[bool] = ..., version: _Optional[int] = ..., fingerprint: _Optional[str] = ..., running_groups: _Optional[int] = ..., groups: _Optional[int] = ..., samples: _Optional[int] = ..., tokens: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., load_error: _Optional[str] = ...) -> None: ...
