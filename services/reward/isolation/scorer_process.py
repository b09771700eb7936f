"""What runs inside a scorer process. It is killed without notice, so it holds nothing worth saving."""

import io
import json
import math
import numbers
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, get_args

from services.common.errors import InvalidData
from services.common.wire.text import readable
from services.reward.isolation.frames import MAX_REASON, encode_outcome, read_frame, write_frame
from services.reward.scorers import load_scorer
from services.reward.scorers.types import FailureCode, Scorer, ScorerFailure, is_deterministic


@dataclass(frozen=True)
class Settings:
    """A scorer's."""

    name: str
    options: dict[str, Any]


def serve(channel: socket.socket, settings: Sequence[dict[str, Any]], missing: Sequence[str]) -> NoReturn:
    """Loads the scorers and says so, then answers one request after another until the service closes `channel`.

    `missing` are the measures of containment that this process has to do without.
    """
    own = os.getpid()
    # What a scorer forks neither reads requests nor keeps the channel open.
    os.register_at_fork(after_in_child=channel.close)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    try:
        scorers = [load_scorer(Settings(**each)) for each in settings]
    except InvalidData as error:
        write_frame(channel, {"problem": [error.code, readable(error, MAX_REASON)]})
        os._exit(0)
    write_frame(channel, {"deterministic": [is_deterministic(scorer) for scorer in scorers], "missing": list(missing)})
    while request := read_frame(channel):
        outcome = run(scorers[request["scorer"]], request["prompt"], request["completion"], request["metadata"])
        if os.getpid() != own:
            # A scorer forked, and its child came back here, too.
            os._exit(0)
        write_frame(channel, encode_outcome(outcome))
    os._exit(0)


def run(scorer: Scorer, prompt: str, completion: str, metadata_json: str) -> float | ScorerFailure:
    """Whatever the scorer returns or raises, SystemExit and objects that raise when they are looked at included."""
    try:
        return _checked(scorer(prompt, completion, json.loads(metadata_json)))
    except BaseException as error:  # noqa: BLE001
        try:
            return ScorerFailure(_describe(error))
        except BaseException:  # noqa: BLE001
            return ScorerFailure("raised what cannot be described")


def _checked(value: Any) -> float | ScorerFailure:
    if isinstance(value, ScorerFailure):
        code = value.code if value.code in get_args(FailureCode) else "scorer_error"
        return ScorerFailure(readable(value.reason, MAX_REASON), code, bool(value.retryable))
    if not isinstance(value, numbers.Real):
        return ScorerFailure(f"returned {type(value).__name__}, expected a number or a ScorerFailure", retryable=False)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    return number if math.isfinite(number) else ScorerFailure(f"returned {number}", code="reward_not_finite")


def _describe(error: BaseException) -> str:
    """The exception and where it was raised, ending with what matters if it is truncated."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f" ({place.tb_frame.f_code.co_filename}:{place.tb_lineno})" if place is not None else ""
    hint = ", more than reward.scorer_memory_mib allows" if isinstance(error, MemoryError) else ""
    what = f"{type(error).__name__}: {readable(error, MAX_REASON - 400)}{hint}"
    return readable(what, MAX_REASON - 300) + readable(where[-300:], 300)
