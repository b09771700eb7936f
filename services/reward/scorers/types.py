"""What a scorer is.

scorer      a callable (prompt, completion, metadata) that says how good a completion is
failure     the scorer could not say; never the same as a score of 0
component   one scorer's value; the raw reward is the weighted sum of the components
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

# scorer_timeout      killed after reward.timeout_seconds
# scorer_error        it raised, or returned something other than a number or a ScorerFailure
# scorer_crash        its process died (a signal, out of memory)
# scorer_metadata     the row lacks what the scorer needs
# reward_not_finite   NaN or infinite
# reward_out_of_range outside [reward.minimum, reward.maximum]
FailureCode = Literal[
    "scorer_timeout", "scorer_error", "scorer_crash", "scorer_metadata", "reward_not_finite", "reward_out_of_range"
]


@dataclass(frozen=True)
class ScorerFailure:
    """Why there is no score. `retryable` is false where another try would end the same."""

    reason: str
    code: FailureCode = "scorer_error"
    retryable: bool = True


class ScorerSettings(Protocol):
    """A ScorerConfig, or as much of it in a scorer process, whose start would take twice as long with all of it."""

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> dict[str, Any]: ...


Metadata = Mapping[str, Any]
Scorer = Callable[[str, str, Metadata], float | ScorerFailure]

S = TypeVar("S", bound=Callable[..., float | ScorerFailure])
_DETERMINISTIC = "deterministic"


def deterministic(scorer: S) -> S:
    """Marks a scorer whose value depends on its arguments alone, so that it may be cached."""
    setattr(scorer, _DETERMINISTIC, True)
    return scorer


def is_deterministic(scorer: Scorer) -> bool:
    return bool(getattr(scorer, _DETERMINISTIC, False))
