import re
from typing import Literal

from pydantic import validate_call

from services.common.errors import InvalidData
from services.reward.scorers.answer import metadata_failure
from services.reward.scorers.types import Metadata, Scorer, ScorerFailure, deterministic


@validate_call
def build(
    *,
    pattern: str | None = None,
    pattern_field: str = "pattern",
    mode: Literal["search", "fullmatch"] = "search",
    ignore_case: bool = False,
) -> Scorer:
    """1.0 when the completion matches `pattern`, or without it the row's metadata[pattern_field]; else 0.0.

    Syntax of Python's re, with DOTALL. A pattern that backtracks forever ends with the scorer's timeout.
    Raises InvalidData("scorer_options") for a pattern that does not compile.
    """
    flags = re.DOTALL | (re.IGNORECASE if ignore_case else 0)
    try:
        fixed = None if pattern is None else re.compile(pattern, flags)
    except re.error as error:
        raise InvalidData(
            "scorer_options", f"reward.scorers: options of regex: pattern is {pattern!r}: {error}"
        ) from error

    @deterministic
    def regex(_prompt: str, completion: str, metadata: Metadata) -> float | ScorerFailure:
        compiled = fixed or _compile(metadata.get(pattern_field), pattern_field, flags)
        if isinstance(compiled, ScorerFailure):
            return compiled
        found = compiled.search(completion) if mode == "search" else compiled.fullmatch(completion)
        return float(found is not None)

    return regex


def _compile(pattern: object, field: str, flags: int) -> re.Pattern[str] | ScorerFailure:
    if not isinstance(pattern, str):
        return metadata_failure(f"metadata.{field} is {pattern!r}, expected a regular expression"[:300])
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        return metadata_failure(f"metadata.{field} is {pattern[:200]!r}, which is no regular expression ({error})")
