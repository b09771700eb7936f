from trivet.v1 import sample_pb2 as _sample_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StepAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_ACTION_UNSPECIFIED: _ClassVar[StepAction]
    STEP_ACTION_WAIT: _ClassVar[StepAction]
    STEP_ACTION_TRAIN: _ClassVar[StepAction]
    STEP_ACTION_SAVE: _ClassVar[StepAction]
    STEP_ACTION_STOP: _ClassVar[StepAction]
    STEP_ACTION_PUBLISH: _ClassVar[StepAction]
STEP_ACTION_UNSPECIFIED: StepAction
STEP_ACTION_WAIT: StepAction
STEP_ACTION_TRAIN: StepAction
STEP_ACTION_SAVE: StepAction
STEP_ACTION_STOP: StepAction
STEP_ACTION_PUBLISH: StepAction

class StepOrder(_message.Message):
    __slots__ = ("action", "groups", "replay")
    ACTION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FIELD_NUMBER: _ClassVar[int]
    action: StepAction
    groups: _containers.RepeatedCompositeFieldContainer[_sample_pb2.ScoredGroup]
    replay: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, action: _Optional[_Union[StepAction, str]] = ..., groups: _Optional[_Iterable[_Union[_sample_pb2.ScoredGroup, _Mapping]]] = ..., replay: _Optional[_Iterable[bytes]] = ...) -> None: ...
