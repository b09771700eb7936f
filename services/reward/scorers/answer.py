"""The reference answer in a row's metadata."""

from services.reward.types import Metadata, ScorerFailure


def read_answer(metadata: Metadata, field: str) -> str | ScorerFailure:
    """The answer as text; a row without one cannot be scored, however often it is tried."""
    value = metadata.get(field)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        found = f"{type(value).__name__} {value!r}"[:200] if field in metadata else "missing"
        return metadata_failure(f"metadata.{field} is {found}, expected the reference answer as text or a number")
    return str(value)


def metadata_failure(reason: str) -> ScorerFailure:
    return ScorerFailure(reason, code="scorer_metadata", retryable=False)
