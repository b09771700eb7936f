"""The reference answer in a row's metadata."""

from decimal import Decimal

from services.reward.scorers.types import Metadata, ScorerFailure


def read_answer(metadata: Metadata, field: str) -> str | ScorerFailure:
    """The answer as text, numbers without exponent; a row that has none can never be scored."""
    value = metadata.get(field)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        found = f"{type(value).__name__} {value!r}"[:200] if field in metadata else "missing"
        return metadata_failure(f"metadata.{field} is {found}, expected the reference answer as text or a number")
    # In LaTeX, 1e-07 is a product.
    return format(Decimal(repr(value)), "f") if isinstance(value, float) else str(value)


def metadata_failure(reason: str) -> ScorerFailure:
    return ScorerFailure(reason, code="scorer_metadata", retryable=False)
