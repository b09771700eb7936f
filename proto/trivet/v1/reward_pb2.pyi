from trivet.v1 import sample_pb2 as _sample_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScoreRequest(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: _sample_pb2.Group
    def __init__(self, group: _Optional[_Union[_sample_pb2.Group, _Mapping]] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("scored", "failure")
    SCORED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    scored: _sample_pb2.ScoredGroup
    failure: ScoreFailure
    def __init__(self, scored: _Optional[_Union[_sample_pb2.ScoredGroup, _Mapping]] = ..., failure: _Optional[_Union[ScoreFailure, _Mapping]] = ...) -> None: ...

class ScoreFailure(_message.Message):
    __slots__ = ("code", "reason", "scorer", "sample_id")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SCORER_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    code: str
    reason: str
    scorer: str
    sample_id: str
    def __init__(self, code: _Optional[str] = ..., reason: _Optional[str] = ..., scorer: _Optional[str] = ..., sample_id: _Optional[str] = ...) -> None: ...

class RewardServiceGetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RewardServiceGetStatusResponse(_message.Message):
    __slots__ = ("reward_id", "running_groups", "groups", "samples", "failures", "cache_hits", "mean_reward", "scorers")
    REWARD_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_GROUPS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    MEAN_REWARD_FIELD_NUMBER: _ClassVar[int]
    SCORERS_FIELD_NUMBER: _ClassVar[int]
    reward_id: str
    running_groups: int
    groups: int
    samples: int
    failures: int
    cache_hits: int
    mean_reward: float
    scorers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, reward_id: _Optional[str] = ..., running_groups: _Optional[int] = ..., groups: _Optional[int] = ..., samples: _Optional[int] = ..., failures: _Optional[int] = ..., cache_hits: _Optional[int] = ..., mean_reward: _Optional[float] = ..., scorers: _Optional[_Iterable[str]] = ...) -> None: ...
