"""What runs inside a scorer process. It is killed without notice, so it holds nothing worth saving."""

import fcntl
import json
import math
import multiprocessing
import numbers
import os
import signal
import sys
import traceback
from typing import Any, get_args

from services.common.config import ScorerConfig
from services.common.errors import InvalidData
from services.reward.scorers import load_scorer
from services.reward.types import FailureCode, Scorer, ScorerFailure, is_deterministic

MAX_REASON = 2_000

_scorers: list[Scorer] = []
_problem: InvalidData | None = None


def prepare(configs: list[dict[str, Any]]) -> None:
    """Loads the scorers, so that the first sample does not pay for it. A problem is kept for `describe`."""
    global _problem  # noqa: PLW0603 - a scorer process is one object; its module is that object
    # The default action needs no interpreter: it ends a scorer that is stuck in C code, too.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _end_with_the_service()
    try:
        _scorers[:] = [load_scorer(ScorerConfig.model_validate(config)) for config in configs]
    except InvalidData as error:
        _problem = error


def _end_with_the_service() -> None:
    """A scorer that loops for ever must not outlive a service that was killed.

    The kernel sends SIGIO, whose default action ends the process, when the service's end of the pipe closes.
    """
    service = multiprocessing.parent_process()
    if service is None or sys.platform != "linux":
        return
    pipe = service.sentinel
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if not service.is_alive():
        sys.exit("the service ended while a scorer process started")


def describe() -> list[bool] | tuple[str, str]:
    """For each scorer whether it is deterministic, or the code and message of what kept them from loading."""
    if _problem is not None:
        return _problem.code, str(_problem)
    return [is_deterministic(scorer) for scorer in _scorers]


def run(scorer: int, prompt: str, completion: str, metadata_json: str) -> float | ScorerFailure:
    if _problem is not None:
        return ScorerFailure(str(_problem), retryable=False)
    try:
        value = _scorers[scorer](prompt, completion, json.loads(metadata_json))
    except BaseException as error:  # noqa: BLE001 - whatever a user's scorer raises, SystemExit too, is its failure
        return ScorerFailure(_last_lines(error))
    return _checked(value)


def _checked(value: Any) -> float | ScorerFailure:
    if isinstance(value, ScorerFailure):
        code = value.code if value.code in get_args(FailureCode) else "scorer_error"
        return ScorerFailure(str(value.reason)[:MAX_REASON], code, bool(value.retryable))
    if not isinstance(value, numbers.Real):
        return ScorerFailure(f"returned {type(value).__name__}, expected a number or a ScorerFailure", retryable=False)
    number = float(value)
    return number if math.isfinite(number) else ScorerFailure(f"returned {number}", code="reward_not_finite")


def _last_lines(error: BaseException) -> str:
    """The exception and where it was raised, ending with what matters when it is cut."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error}"[: MAX_REASON - 300] + f" ({where.filename}:{where.lineno})"[-300:]
