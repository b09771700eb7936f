"""Numbers that JSON does not have."""

import math
from typing import Any


def strict(value: Any) -> Any:
    """The same with null in the place of NaN and infinity, at any depth."""
    match value:
        case dict():
            return {key: strict(each) for key, each in value.items()}
        case list() | tuple():
            return [strict(each) for each in value]
        case float() if not math.isfinite(value):
            return None
    return value
