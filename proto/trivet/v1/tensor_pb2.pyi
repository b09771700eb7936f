from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_UNSPECIFIED: _ClassVar[Codec]
    CODEC_RAW: _ClassVar[Codec]
    CODEC_ZSTD: _ClassVar[Codec]
CODEC_UNSPECIFIED: Codec
CODEC_RAW: Codec
CODEC_ZSTD: Codec

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "codec", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    codec: Codec
    data: bytes
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., codec: _Optional[_Union[Codec, str]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ReplayData(_message.Message):
    __slots__ = ("sample_id", "routing", "candidate_counts", "candidate_ids")
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_COUNTS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_IDS_FIELD_NUMBER: _ClassVar[int]
    sample_id: str
    routing: Tensor
    candidate_counts: Tensor
    candidate_ids: Tensor
    def __init__(self, sample_id: _Optional[str] = ..., routing: _Optional[_Union[Tensor, _Mapping]] = ..., candidate_counts: _Optional[_Union[Tensor, _Mapping]] = ..., candidate_ids: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class BlobReference(_message.Message):
    __slots__ = ("key", "size", "checksum")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    key: str
    size: int
    checksum: int
    def __init__(self, key: _Optional[str] = ..., size: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...
