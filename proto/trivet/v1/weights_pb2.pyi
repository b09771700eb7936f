from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WeightFile(_message.Message):
    __slots__ = ("name", "size", "checksum")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    checksum: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class WeightVersion(_message.Message):
    __slots__ = ("version", "path", "files", "fingerprint", "published_at")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_AT_FIELD_NUMBER: _ClassVar[int]
    version: int
    path: str
    files: _containers.RepeatedCompositeFieldContainer[WeightFile]
    fingerprint: str
    published_at: float
    def __init__(self, version: _Optional[int] = ..., path: _Optional[str] = ..., files: _Optional[_Iterable[_Union[WeightFile, _Mapping]]] = ..., fingerprint: _Optional[str] = ..., published_at: _Optional[float] = ...) -> None: ...

class TensorDescription(_message.Message):
    __slots__ = ("name", "dtype", "shape")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class PublicationPlan(_message.Message):
    __slots__ = ("staging", "transfer")
    STAGING_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    staging: str
    transfer: bool
    def __init__(self, staging: _Optional[str] = ..., transfer: _Optional[bool] = ...) -> None: ...
