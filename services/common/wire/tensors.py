"""Arrays to protobuf tensors and back, bit for bit."""

import math
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray
from trivet.v1 import tensor_pb2

from services.common.errors import InvalidData

Array = NDArray[Any]
DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "uint16", "int32", "int64", "float32")}
MAX_TENSOR_BYTES = 2**31 - 1
MAX_DIMENSIONS = 8
# Below this a zstd frame's own header outweighs what it saves.
COMPRESS_FROM_BYTES = 64


def encode_tensor(array: Array) -> tensor_pb2.Tensor:
    """Raises InvalidData for a dtype that has no wire name."""
    name = array.dtype.name
    if name not in DTYPES:
        raise InvalidData("tensor_dtype", f"dtype is {name}, expected one of {sorted(DTYPES)}")
    raw = np.ascontiguousarray(array, dtype=DTYPES[name]).tobytes()
    codec, data = tensor_pb2.CODEC_RAW, raw
    if len(raw) >= COMPRESS_FROM_BYTES:
        packed = zstandard.ZstdCompressor(level=1).compress(raw)
        if len(packed) < len(raw):
            codec, data = tensor_pb2.CODEC_ZSTD, packed
    return tensor_pb2.Tensor(dtype=name, shape=array.shape, codec=codec, data=data)


def decode_tensor(tensor: tensor_pb2.Tensor, field: str, max_bytes: int = MAX_TENSOR_BYTES) -> Array:
    """A read-only array of at most `max_bytes`. Raises InvalidData that names `field` for anything malformed."""
    if tensor.dtype not in DTYPES:
        raise InvalidData("tensor_dtype", f"{field}.dtype is {tensor.dtype!r}, expected one of {sorted(DTYPES)}")
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise InvalidData(
            "tensor_shape", f"{field}.shape has {len(tensor.shape)} dimensions, at most {MAX_DIMENSIONS} allowed"
        )
    dtype = DTYPES[tensor.dtype]
    limit = min(max_bytes, MAX_TENSOR_BYTES)
    # NumPy multiplies the other extents of an empty array, too.
    if dtype.itemsize * math.prod(extent or 1 for extent in tensor.shape) > limit:
        raise InvalidData(
            "tensor_size",
            f"{field}.shape {list(tensor.shape)} of {tensor.dtype} takes more than the {limit} bytes allowed",
        )
    expected = dtype.itemsize * math.prod(tensor.shape)
    raw = _decompress(tensor, expected, field)
    if len(raw) != expected:
        raise InvalidData(
            "tensor_size",
            f"{field}.data has {len(raw)} bytes, expected {expected} for shape {list(tensor.shape)} of {tensor.dtype}",
        )
    return np.frombuffer(raw, dtype=dtype).reshape(tuple(tensor.shape))


def _decompress(tensor: tensor_pb2.Tensor, expected: int, field: str) -> bytes:
    if tensor.codec == tensor_pb2.CODEC_RAW:
        return tensor.data
    if tensor.codec != tensor_pb2.CODEC_ZSTD:
        raise InvalidData("tensor_codec", f"{field}.codec is {tensor.codec}, expected CODEC_RAW or CODEC_ZSTD")
    try:
        # The frame's own content size is not trusted: it could ask for any amount of memory.
        return zstandard.ZstdDecompressor().stream_reader(tensor.data).read(expected + 1)
    except zstandard.ZstdError as error:
        raise InvalidData("tensor_corrupt", f"{field}.data is not a zstd frame ({error})") from error
