import math
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator


class Section(BaseModel):
    """A part of the YAML: unknown keys are refused, numbers are finite, and assignments are validated."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _finite(cls, value: Any) -> Any:
        """What others read, such as engine arguments, has no types of ours."""
        if problems := list(_not_finite(value, "")) if isinstance(value, dict) else []:
            raise ValueError(", ".join(problems))
        return value


def _not_finite(value: Any, path: str) -> Iterator[str]:
    match value:
        case dict():
            for key, each in value.items():
                yield from _not_finite(each, f"{path}.{key}" if path else str(key))
        case list() | tuple():
            for index, each in enumerate(value):
                yield from _not_finite(each, f"{path}.{index}")
        case float() if not math.isfinite(value):
            yield f"{path} is {value}, expected a finite number"
