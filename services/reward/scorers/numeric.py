import math
import re
from typing import Annotated

from pydantic import Field, validate_call

from services.reward.scorers.answer import metadata_failure, read_answer
from services.reward.types import Metadata, Scorer, ScorerFailure, deterministic

# A sign right after a digit is a minus between two numbers: "10-5" ends with 5.
NUMBER = re.compile(
    r"(?<![0-9.])[-+]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
)


@validate_call
def build(
    *,
    answer_field: str = "answer",
    absolute_tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6,
    relative_tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.0,
) -> Scorer:
    """1.0 when the last number in the completion is the answer within either tolerance, else 0.0.

    Thousands separators (1,234.5) and exponents (1e-3) are read. A completion without a number is wrong: 0.0.
    """

    @deterministic
    def numeric(_prompt: str, completion: str, metadata: Metadata) -> float | ScorerFailure:
        answer = read_answer(metadata, answer_field)
        if isinstance(answer, ScorerFailure):
            return answer
        expected = _whole(answer)
        if expected is None or not math.isfinite(expected):
            return metadata_failure(f"metadata.{answer_field} is {answer[:200]!r}, expected a finite number")
        given = last_number(completion)
        if given is None:
            return 0.0
        return float(math.isclose(given, expected, rel_tol=relative_tolerance, abs_tol=absolute_tolerance))

    return numeric


def last_number(text: str) -> float | None:
    matches = NUMBER.findall(_plain(text))
    return float(matches[-1].replace(",", "")) if matches else None


def _whole(text: str) -> float | None:
    match = NUMBER.fullmatch(_plain(text).strip())
    return float(match.group().replace(",", "")) if match else None


def _plain(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")
