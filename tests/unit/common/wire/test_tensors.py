import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from trivet.v1 import tensor_pb2

from services.common.errors import InvalidData
from services.common.wire.tensors import DTYPES, decode_tensor, encode_tensor

arrays = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda name: hnp.arrays(np.dtype(name), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9))
)


@given(arrays)
def test_round_trip_is_bit_exact(array):
    tensor = tensor_pb2.Tensor.FromString(encode_tensor(array).SerializeToString())
    back = decode_tensor(tensor, "field")
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


def test_repetitive_data_is_compressed():
    assert len(encode_tensor(np.zeros((1000, 4), np.uint8)).data) < 100


def test_unknown_array_type_is_refused():
    with pytest.raises(InvalidData, match="dtype is float64"):
        encode_tensor(np.zeros(3))


def bomb() -> bytes:
    import zstandard

    return zstandard.ZstdCompressor().compress(bytes(10_000_000))


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"dtype": "object"}, "tensor_dtype"),
        ({"dtype": ""}, "tensor_dtype"),
        ({"codec": tensor_pb2.CODEC_UNSPECIFIED}, "tensor_codec"),
        ({"codec": 9}, "tensor_codec"),
        ({"codec": tensor_pb2.CODEC_ZSTD, "data": b"not a frame"}, "tensor_corrupt"),
        ({"codec": tensor_pb2.CODEC_ZSTD, "data": bomb()}, "tensor_size"),
        ({"data": bytes(7)}, "tensor_size"),
        ({"shape": [2, 2]}, "tensor_size"),
        ({"shape": [2**31, 2**31]}, "tensor_size"),
        ({"shape": [0, *[2**32 - 1] * 3], "data": b""}, "tensor_size"),
        ({"shape": [1] * 100, "data": bytes(4)}, "tensor_shape"),
        ({"shape": [2] * 1_000_000}, "tensor_shape"),
    ],
)
def test_malformed_tensor_is_refused_by_name(change, code):
    fields = {"dtype": "int32", "shape": [2], "codec": tensor_pb2.CODEC_RAW, "data": bytes(8), **change}
    with pytest.raises(InvalidData, match="replay.routing") as refusal:
        decode_tensor(tensor_pb2.Tensor(**fields), "replay.routing")
    assert refusal.value.code == code


def test_no_more_is_decompressed_than_the_caller_allows():
    tensor = encode_tensor(np.zeros(1000, np.int32))
    assert len(decode_tensor(tensor, "field", max_bytes=4000)) == 1000
    with pytest.raises(InvalidData, match="more than the 3999 bytes allowed"):
        decode_tensor(tensor, "field", max_bytes=3999)


def test_truncated_frame_is_refused():
    tensor = encode_tensor(np.arange(1000, dtype=np.int32) % 7)
    tensor.data = tensor.data[: len(tensor.data) // 2]
    with pytest.raises(InvalidData):
        decode_tensor(tensor, "replay.routing")
