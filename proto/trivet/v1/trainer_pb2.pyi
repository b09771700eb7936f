from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TrainerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRAINER_STATE_UNSPECIFIED: _ClassVar[TrainerState]
    TRAINER_STATE_STARTING: _ClassVar[TrainerState]
    TRAINER_STATE_EVALUATING: _ClassVar[TrainerState]
    TRAINER_STATE_WAITING: _ClassVar[TrainerState]
    TRAINER_STATE_TRAINING: _ClassVar[TrainerState]
    TRAINER_STATE_PAUSED: _ClassVar[TrainerState]
    TRAINER_STATE_FINISHED: _ClassVar[TrainerState]
    TRAINER_STATE_FAILED: _ClassVar[TrainerState]
TRAINER_STATE_UNSPECIFIED: TrainerState
TRAINER_STATE_STARTING: TrainerState
TRAINER_STATE_EVALUATING: TrainerState
TRAINER_STATE_WAITING: TrainerState
TRAINER_STATE_TRAINING: TrainerState
TRAINER_STATE_PAUSED: TrainerState
TRAINER_STATE_FINISHED: TrainerState
TRAINER_STATE_FAILED: TrainerState

class TrainerServiceGetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TrainerServiceGetStatusResponse(_message.Message):
    __slots__ = ("run", "state", "step", "steps", "version", "metrics", "evaluation", "groups_issued", "groups_trained", "groups_in_flight", "checkpoint_step", "eta_seconds")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class EvaluationEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_ISSUED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_TRAINED_FIELD_NUMBER: _ClassVar[int]
    GROUPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_STEP_FIELD_NUMBER: _ClassVar[int]
    ETA_SECONDS_FIELD_NUMBER: _ClassVar[int]
    run: str
    state: TrainerState
    step: int
    steps: int
    version: int
    metrics: _containers.ScalarMap[str, float]
    evaluation: _containers.ScalarMap[str, float]
    groups_issued: int
    groups_trained: int
    groups_in_flight: int
    checkpoint_step: int
    eta_seconds: float
    def __init__(self, run: _Optional[str] = ..., state: _Optional[_Union[TrainerState, str]] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., version: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., evaluation: _Optional[_Mapping[str, float]] = ..., groups_issued: _Optional[int] = ..., groups_trained: _Optional[int] = ..., groups_in_flight: _Optional[int] = ..., checkpoint_step: _Optional[int] = ..., eta_seconds: _Optional[float] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveCheckpointResponse(_message.Message):
    __slots__ = ("checkpoint",)
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    checkpoint: Checkpoint
    def __init__(self, checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("step", "path", "saved_at", "size")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SAVED_AT_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    step: int
    path: str
    saved_at: float
    size: int
    def __init__(self, step: _Optional[int] = ..., path: _Optional[str] = ..., saved_at: _Optional[float] = ..., size: _Optional[int] = ...) -> None: ...

class ListCheckpointsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListCheckpointsResponse(_message.Message):
    __slots__ = ("checkpoints",)
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedCompositeFieldContainer[Checkpoint]
    def __init__(self, checkpoints: _Optional[_Iterable[_Union[Checkpoint, _Mapping]]] = ...) -> None: ...

class TrainerServicePauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TrainerServicePauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TrainerServiceResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TrainerServiceResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
