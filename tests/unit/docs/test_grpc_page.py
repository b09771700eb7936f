"""The reference of the gRPC services is that of the protos, and complete."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpc_reference", ROOT / "docs" / "grpc_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_fresh(generator: ModuleType) -> None:
    assert (ROOT / "docs" / "grpc.md").read_text(encoding="utf-8") == generator.page(), "run: make docs"


def test_every_service_method_message_and_field_is_on_the_page(generator: ModuleType) -> None:
    page = (ROOT / "docs" / "grpc.md").read_text(encoding="utf-8")
    files: list[FileDescriptorProto] = generator.descriptors()

    wanted = [f"## {service.name}\n" for file in files for service in file.service]
    wanted += [f"- **{method.name}**: " for file in files for service in file.service for method in service.method]
    wanted += [f"### {message.name}\n" for file in files for message in file.message_type]
    wanted += [
        f"| {field.number} | `{field.name}` | "
        for file in files
        for message in file.message_type
        for field in message.field
    ]
    assert len(files) == len(list((ROOT / "proto" / "trivet" / "v1").glob("*.proto")))
    assert [each for each in wanted if each not in page] == []


def test_a_field_without_a_comment_is_refused(generator: ModuleType) -> None:
    file = next(file for file in generator.descriptors() if file.name.endswith("reward.proto"))
    comments = generator.Comments(file)

    assert comments.at(generator.SERVICES, 0)
    with pytest.raises(ValueError, match="reward.proto"):
        comments.at(generator.SERVICES, 99)
