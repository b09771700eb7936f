"""Messages between the service and a scorer process: JSON, preceded by its length.

Not pickle: a scorer could make the service run anything. ASCII, so that a lone surrogate is as good as any character.
"""

import asyncio
import json
import math
import socket
import struct
from typing import Any, get_args

from services.common.wire.text import readable
from services.reward.scorers.types import FailureCode, ScorerFailure

MAX_REASON = 2_000
# A reason of the longest, each character escaped, and room around it.
MAX_REPLY_BYTES = 64 * 2**10

_HEADER = struct.Struct("<I")


def pack_frame(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return _HEADER.pack(len(data)) + data


def write_frame(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.sendall(pack_frame(message))


def read_frame(channel: socket.socket) -> Any:
    """None once the other side has closed."""
    header = _read(channel, _HEADER.size)
    return None if header is None else json.loads(_read(channel, *_HEADER.unpack(header)) or b"null")


async def receive_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Raises ValueError for what is no frame of a scorer process, IncompleteReadError when it ends first."""
    (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    if size > MAX_REPLY_BYTES:
        raise ValueError(f"its reply has {size} bytes, at most {MAX_REPLY_BYTES} allowed")
    try:
        message = json.loads(await reader.readexactly(size))
    except (ValueError, RecursionError) as error:
        raise ValueError("its reply is not JSON") from error
    if not isinstance(message, dict):
        raise ValueError(f"its reply is {type(message).__name__}, expected an object")
    return message


def encode_outcome(outcome: float | ScorerFailure) -> dict[str, Any]:
    if isinstance(outcome, ScorerFailure):
        return {"reason": outcome.reason, "code": outcome.code, "retryable": outcome.retryable}
    return {"score": outcome}


def decode_outcome(message: dict[str, Any]) -> float | ScorerFailure:
    """Raises ValueError: nothing that a scorer process sends is trusted."""
    score = message.get("score")
    if isinstance(score, float) and math.isfinite(score):
        return score
    retryable = message.get("retryable")
    for code in get_args(FailureCode):
        if code == message.get("code") and isinstance(retryable, bool):
            return ScorerFailure(readable(message.get("reason"), MAX_REASON), code, retryable)
    raise ValueError("its reply is neither a finite score nor a failure")


def _read(channel: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 2**20))
        if not part:
            return None
        parts += part
    return bytes(parts)
