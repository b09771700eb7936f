"""Writes docs/grpc.md from the comments of proto/trivet/v1: `make docs`."""

import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "grpc.md"
PACKAGE = ".trivet.v1."
# Field numbers of FileDescriptorProto and what it holds, of which the paths of comments are made.
MESSAGES, ENUMS, SERVICES = 4, 5, 6
FIELDS, VALUES, METHODS, ONEOFS = 2, 2, 2, 8
# The services' own files first, then what they share.
ORDER = ("rollout", "reward", "trainer", "sample", "tensor", "weights", "step")
PREAMBLE = """\
# gRPC

`make docs` writes this page from the comments in [proto/trivet/v1](../proto/trivet/v1). Each service answers one of the
three gRPC services below, at `<service>.server.host` and `<service>.server.grpc_port`, without TLS; under `trivet up`
the ports are free ones of 127.0.0.1. Prompts, samples and scored groups do not travel by gRPC but as entries of Redis
Streams, in the same messages.

- **Token.** Where `<service>.server.token` is set, every call carries the metadata `authorization: Bearer <token>`.
  Without it the answer is UNAUTHENTICATED, and no message is read. Health checks need none.
- **Health and reflection.** `grpc.health.v1.Health` answers SERVING where `/readyz` answers 200, for the empty name
  and for the service's own. Reflection (`grpc.reflection.v1alpha`) lets grpcurl and others call without the protos.
- **Sizes.** A message may have 256 MiB.
- **Status codes.** OK: the response is what it says. INVALID_ARGUMENT: the request can never succeed as it is.
  FAILED_PRECONDITION: nothing was changed, and the details say why. RESOURCE_EXHAUSTED: too many calls at once; try
  again later. UNAVAILABLE: something the service needs is down, or it is itself; try again. DEADLINE_EXCEEDED: it takes
  longer than the call may. Details of INVALID_ARGUMENT, FAILED_PRECONDITION and UNAVAILABLE mostly begin with a code of
  Trivet's and a colon, as in `prompt_too_long: …`; the same codes label metrics and dead letters.
- **Shapes.** P is the number of prompt tokens, C that of completion tokens, L of MoE layers, K of experts a token.

```bash
grpcurl -plaintext -H 'authorization: Bearer <token>' 127.0.0.1:50051 trivet.v1.TrainerService/GetStatus
```

```python
import grpc
from trivet.v1 import trainer_pb2, trainer_pb2_grpc

with grpc.insecure_channel("127.0.0.1:50051") as channel:
    trainer = trainer_pb2_grpc.TrainerServiceStub(channel)
    metadata = [("authorization", "Bearer <token>")]
    print(trainer.GetStatus(trainer_pb2.TrainerServiceGetStatusRequest(), metadata=metadata, timeout=10))
```
"""


def descriptors() -> list[FileDescriptorProto]:
    """The protos with their comments, in the order of the page."""
    protos = sorted(str(path) for path in (ROOT / "proto" / "trivet" / "v1").glob("*.proto"))
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "descriptors"
        flags = ["--include_source_info", f"--descriptor_set_out={output}"]
        if protoc.main(["protoc", f"-I{ROOT / 'proto'}", *flags, *protos]) != 0:
            raise SystemExit("protoc refuses the protos; its messages are above")
        files = FileDescriptorSet.FromString(output.read_bytes()).file
    return sorted(files, key=lambda file: ORDER.index(Path(file.name).stem))


class Comments:
    """Those of one file, by the path of what they stand before."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file.name
        self._comments = {tuple(each.path): each.leading_comments for each in file.source_code_info.location}

    def at(self, *path: int) -> str:
        """On one line. Raises ValueError where there is none."""
        words = " ".join(self._comments.get(path, "").split())
        if not words:
            raise ValueError(f"{self._file}: nothing is said about {path}")
        return words


def page() -> str:
    files = descriptors()
    lines = [PREAMBLE]
    for file in files:
        comments = Comments(file)
        for index, service in enumerate(file.service):
            lines += _service(service, comments, index)
    for file in files:
        comments = Comments(file)
        lines += [f"## {file.name}", ""]
        for index, message in enumerate(file.message_type):
            lines += _message(message, comments, index)
        for index, enum in enumerate(file.enum_type):
            lines += _enum(enum, comments, index)
    return "\n".join(lines).rstrip() + "\n"


def _service(service: ServiceDescriptorProto, comments: Comments, index: int) -> Iterator[str]:
    yield from (f"## {service.name}", "", *_wrapped(comments.at(SERVICES, index)), "")
    for number, method in enumerate(service.method):
        takes = ("stream of " if method.client_streaming else "") + _link(method.input_type)
        gives = ("stream of " if method.server_streaming else "") + _link(method.output_type)
        yield from _wrapped(f"**{method.name}**: {takes} → {gives}", "- ", end="\\")
        yield from _wrapped(comments.at(SERVICES, index, METHODS, number), "  ")
    yield ""


def _message(message: DescriptorProto, comments: Comments, index: int) -> Iterator[str]:
    yield from (f"### {message.name}", "", *_wrapped(comments.at(MESSAGES, index)), "")
    for number, oneof in enumerate(message.oneof_decl):
        # `optional` is a oneof of one field, which nobody wrote.
        if any(field.proto3_optional and field.oneof_index == number for field in message.field):
            continue
        yield from _wrapped(f"oneof `{oneof.name}`: {comments.at(MESSAGES, index, ONEOFS, number)}")
        yield ""
    if message.field:
        yield from ("| number | field | type | meaning |", "| --- | --- | --- | --- |")
    for position, field in enumerate(message.field):
        meaning = comments.at(MESSAGES, index, FIELDS, position)
        yield f"| {field.number} | `{field.name}` | {_type(message, field)} | {meaning} |"
    if message.field:
        yield ""


def _enum(enum: EnumDescriptorProto, comments: Comments, index: int) -> Iterator[str]:
    yield from (f"### {enum.name}", "", *_wrapped(comments.at(ENUMS, index)), "")
    yield from ("| number | value | meaning |", "| --- | --- | --- |")
    for position, value in enumerate(enum.value):
        yield f"| {value.number} | `{value.name}` | {comments.at(ENUMS, index, VALUES, position)} |"
    yield ""


def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    kinds = FieldDescriptorProto
    if field.type in (kinds.TYPE_MESSAGE, kinds.TYPE_ENUM):
        for nested in message.nested_type:
            if nested.options.map_entry and field.type_name.endswith(f".{message.name}.{nested.name}"):
                key, value = nested.field
                return f"map of {_type(nested, key)} to {_type(nested, value)}"
        name = _link(field.type_name)
    else:
        name = kinds.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == kinds.LABEL_REPEATED:
        return f"repeated {name}"
    if field.proto3_optional:
        return f"optional {name}"
    if field.HasField("oneof_index"):
        return f"{name}, of `{message.oneof_decl[field.oneof_index].name}`"
    return name


def _link(full_name: str) -> str:
    name = full_name.removeprefix(PACKAGE)
    return f"[{name}](#{name.lower()})"


def _wrapped(text: str, first: str = "", end: str = "") -> list[str]:
    following = " " * len(first)
    lines = textwrap.wrap(
        text, 119, initial_indent=first, subsequent_indent=following, break_long_words=False, break_on_hyphens=False
    )
    return [*lines[:-1], lines[-1] + end]


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
