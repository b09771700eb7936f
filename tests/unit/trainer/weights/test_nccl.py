"""The binding against vLLM's own, from its installed source, and what the sender does when its peers have ended."""

import ast
import ctypes
import importlib.util
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from services.common.errors import Unavailable
from services.trainer.weights import nccl
from services.trainer.weights.nccl import NcclCommunicator

pytestmark = pytest.mark.timeout(60)

WRAPPER = "distributed/device_communicators/pynccl_wrapper.py"


@pytest.fixture(scope="module")
def vllm_wrapper():
    """Its types, enumerations and table of functions, run without importing vLLM."""
    source = Path(importlib.util.find_spec("vllm").origin).parent / WRAPPER
    tree = ast.parse(source.read_text(encoding="utf-8"))
    names = {"ncclUniqueId", "ncclDataTypeEnum", "ncclRedOpTypeEnum", "Function"}
    kept = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith(("_t", "buffer_type")):
            kept.append(node)
        elif isinstance(node, ast.ClassDef) and node.name in names:
            node.body = [each for each in node.body if not isinstance(each, ast.FunctionDef)]
            kept.append(node)
        elif isinstance(node, ast.ClassDef) and node.name == "NCCLLibrary":
            (table,) = [each for each in node.body if ast.unparse(each).startswith("exported_functions")]
            kept.append(table)
    scope: dict[str, Any] = {"ctypes": ctypes, "dataclass": dataclass, "Any": Any, "ncclCommProperties": ctypes.c_int}
    exec(compile(ast.Module(kept, []), str(source), "exec"), scope)
    return scope


def shape(kind, unique_id):
    """A ctypes type, with both modules' structures for one another's."""
    if kind is unique_id:
        return "unique id"
    if kind == ctypes.POINTER(unique_id):
        return "pointer to a unique id"
    return kind


def test_every_function_has_the_signature_that_vllm_gives_it(vllm_wrapper):
    theirs = {function.name: function for function in vllm_wrapper["exported_functions"]}
    for name, (result, arguments) in nccl.FUNCTIONS.items():
        assert result is theirs[name].restype, name
        ours = [shape(kind, nccl.UniqueId) for kind in arguments]
        assert ours == [shape(kind, vllm_wrapper["ncclUniqueId"]) for kind in theirs[name].argtypes], name


def test_every_constant_is_vllms(vllm_wrapper):
    assert vllm_wrapper["ncclDataTypeEnum"].ncclUint8 == nccl._UINT8
    assert vllm_wrapper["ncclDataTypeEnum"].ncclFloat32 == nccl._FLOAT32
    assert vllm_wrapper["ncclRedOpTypeEnum"].ncclSum == nccl._SUM
    assert ctypes.sizeof(vllm_wrapper["ncclUniqueId"]) == nccl.UNIQUE_ID_BYTES == ctypes.sizeof(nccl.UniqueId)


class Library:
    """Calls and their arguments; `ncclBroadcast` may be made to hang until an abort, as NCCL does without a peer."""

    def __init__(self):
        self.calls, self.result, self.hangs = [], 0, False
        self.aborted = threading.Event()

    def __getattr__(self, name):
        assert name in nccl.FUNCTIONS

        def call(*arguments):
            self.calls.append((name, *arguments))
            if name == "ncclCommAbort":
                self.aborted.set()
            if name == "ncclBroadcast" and self.hangs:
                assert self.aborted.wait(30)
            return b"a reason" if name == "ncclGetErrorString" else self.result

        return call


@pytest.fixture
def cuda():
    """No CUDA: what the communicator asks of torch's streams and devices."""

    @contextmanager
    def device(_):
        yield

    stream = SimpleNamespace(cuda_stream=77, synchronize=lambda: None)
    with mock.patch("torch.cuda.device", device), mock.patch("torch.cuda.current_stream", return_value=stream):
        yield


@pytest.fixture
def library():
    return Library()


@pytest.fixture
def communicator(library, cuda):
    return NcclCommunicator(library, bytes(range(128)), 3, torch.device("cpu"))


def test_it_meets_the_others_as_vllms_workers_do(library, communicator):
    """By the unique id, and then an all-reduce of one float, which every rank has to join."""
    (name, _, world_size, unique_id, rank), (reduce, one, same, count, dtype, operation, _, stream) = library.calls
    assert (name, world_size, bytes(unique_id), rank.value) == ("ncclCommInitRank", 3, bytes(range(128)), 0)
    assert (reduce, one, count, dtype, operation, stream) == ("ncclAllReduce", same, 1, 7, 0, 77)


def test_a_broadcast_is_of_bytes_from_rank_0(library, communicator):
    buffer = torch.zeros(24, dtype=torch.uint8)
    communicator.broadcast(buffer)
    name, sent, received, count, dtype, root, _, stream = library.calls[-1]
    assert (name, sent, received) == ("ncclBroadcast", buffer.data_ptr(), buffer.data_ptr())
    assert (count, dtype, root, stream) == (24, 1, 0, 77)


def test_an_error_has_nccls_own_words(library, communicator):
    library.result = 5
    with pytest.raises(Unavailable, match="NCCL: a reason") as failure:
        communicator.broadcast(torch.zeros(1, dtype=torch.uint8))
    assert failure.value.code == "nccl"


def test_what_hangs_is_cut_off_and_nothing_follows(library, communicator, monkeypatch):
    monkeypatch.setattr(nccl, "ABORT_PATIENCE_SECONDS", 0.05)
    library.hangs = True
    buffer = torch.zeros(1, dtype=torch.uint8)
    hanging = threading.Thread(target=communicator.broadcast, args=(buffer,))
    hanging.start()
    communicator.abort()
    hanging.join(10)
    assert not hanging.is_alive()
    before = len(library.calls)
    with pytest.raises(Unavailable, match="aborted"):
        communicator.broadcast(buffer)
    communicator.abort()
    assert len(library.calls) == before
    assert [name for name, *_ in library.calls].count("ncclCommAbort") == 1
