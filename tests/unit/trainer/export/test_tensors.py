from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from services.common.errors import InvalidData
from services.trainer.export.policy_files import write_model
from services.trainer.export.tensors import WeightSource, describe, size, whole_tensors
from services.trainer.weights.parts import broadcast_parts, buffer_parts, fill
from tests.support.trainer.model_families import FAMILIES, make_model


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_in_memory_are_those_of_the_export(family, tmp_path):
    model = make_model(family)
    write_model(model, {name: tensor.clone() for name, tensor in whole_tensors(model, None)}, tmp_path)
    on_disk = {name: each for path in tmp_path.glob("*.safetensors") for name, each in load_file(path).items()}
    source = WeightSource(model, None)
    in_memory = [(name, tensor.clone()) for name, tensor in source]
    assert [describe(name, tensor) for name, tensor in in_memory] == source.tensors
    assert {name for name, _ in in_memory} == on_disk.keys()
    assert len(in_memory) == len(on_disk)
    for name, tensor in in_memory:
        assert torch.equal(tensor, on_disk[name]), name
    assert source.total_bytes == sum(tensor.nbytes for tensor in on_disk.values())


class Cutting:
    """As ZeRO-3: a parameter is whole only inside; the order of the calls is what the ranks must agree on."""

    def __init__(self, model):
        self.calls = []
        self._whole = {}
        for name, parameter in model.named_parameters():
            parameter.ds_shape = parameter.shape
            self._whole[parameter] = (name, parameter.data)
            parameter.data = torch.empty(0, dtype=parameter.dtype)

    def is_sharded(self, parameter):
        return parameter in self._whole

    @contextmanager
    def whole(self, parameters):
        for parameter in parameters:
            name, parameter.data = self._whole[parameter]
            self.calls.append(name)
        yield
        for parameter in parameters:
            parameter.data = torch.empty(0, dtype=parameter.dtype)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_cut_model_is_gathered_alike_by_who_reads_and_who_helps(family):
    plain = {name: tensor.clone() for name, tensor in WeightSource(make_model(family), None)}
    model = make_model(family)
    cutting = Cutting(model)
    source = WeightSource(model, cutting)
    # Shapes are known without gathering.
    assert cutting.calls == []
    assert {name: list(tensor.shape) for name, tensor in plain.items()} == {
        tensor.name: list(tensor.shape) for tensor in source.tensors
    }
    for name, tensor in source:
        assert torch.equal(tensor, plain[name]), name
    read, cutting.calls = cutting.calls, []
    source.gather()
    assert cutting.calls == read
    assert len(read) == len(dict(model.named_parameters()))


def test_a_model_whose_hub_tensors_hold_several_parameters_is_refused(monkeypatch):
    def fused(_, state):
        return {"both": torch.cat([tensor.flatten() for tensor in state.values()])}

    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", fused)
    with pytest.raises(InvalidData, match="weights.transfer is not possible for Linear, expected disk"):
        WeightSource(nn.Linear(3, 3), None)


DTYPES = st.sampled_from([torch.bfloat16, torch.float32, torch.uint8])
SHAPES = st.lists(st.tuples(DTYPES, st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=12)


def tensors_of(shapes):
    torch.manual_seed(0)
    return {
        f"t{index}": (torch.rand(rows, columns) * 100).to(dtype) for index, (dtype, rows, columns) in enumerate(shapes)
    }


def read_back(buffer, descriptions):
    """As vLLM's unpack_tensor: split by bytes, then seen as the dtype."""
    for piece, description in zip(buffer.split([size(each) for each in descriptions]), descriptions, strict=True):
        yield description.name, piece.contiguous().view(getattr(torch, description.dtype)).view(list(description.shape))


def aligned(descriptions, buffer_bytes):
    """Whether no tensor of the stream begins between two of its elements."""
    offset = 0
    for description in descriptions:
        if offset % getattr(torch, description.dtype).itemsize:
            return False
        offset += size(description)
        offset = 0 if offset > buffer_bytes else offset
    return True


@given(shapes=SHAPES, buffer_bytes=st.integers(1, 200), cut=st.sampled_from([broadcast_parts, buffer_parts]))
def test_whatever_is_packed_is_read_back(shapes, buffer_bytes, cut):
    tensors = tensors_of(shapes)
    descriptions = [describe(name, tensor) for name, tensor in tensors.items()]
    if cut is broadcast_parts and not aligned(descriptions, buffer_bytes):
        # Only a buffer's parts can be cut elsewhere.
        with pytest.raises(InvalidData, match="would begin at byte"):
            cut(descriptions, buffer_bytes)
        return
    parts = cut(descriptions, buffer_bytes)
    assert [part.first for part in parts] == [sum(each.count for each in parts[:index]) for index in range(len(parts))]
    assert sum(part.count for part in parts) == len(descriptions)
    if cut is buffer_parts:
        assert all(part.bytes <= buffer_bytes or part.count == 1 for part in parts)
    else:
        # Each but the last is longer than the buffer, and would not be without its last tensor.
        for part in parts[:-1]:
            assert part.bytes > buffer_bytes >= part.bytes - size(descriptions[part.first + part.count - 1])
    buffer = torch.empty(max(part.bytes for part in parts), dtype=torch.uint8)
    left = iter(tensors.items())
    for part in parts:
        filled = fill(buffer, part, left, descriptions)
        assert filled.numel() == part.bytes
        for name, tensor in read_back(filled, descriptions[part.first : part.first + part.count]):
            assert torch.equal(tensor, tensors[name])
    assert next(left, None) is None


def test_a_source_that_ends_early_is_an_error():
    descriptions = [describe("a", torch.zeros(2)), describe("b", torch.zeros(2))]
    (part,) = buffer_parts(descriptions, 100)
    with pytest.raises(InvalidData, match="ended after 1 tensors, expected 2"):
        fill(torch.empty(16, dtype=torch.uint8), part, iter([("a", torch.zeros(2))]), descriptions)
