import math
from typing import Annotated

from pydantic import Field, validate_call

from services.reward.scorers.answer import metadata_failure, read_answer
from services.reward.scorers.number import is_close, last_number, whole_number
from services.reward.scorers.types import Metadata, Scorer, ScorerFailure, deterministic


@validate_call
def build(
    *,
    answer_field: str = "answer",
    absolute_tolerance: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-6,
    relative_tolerance: Annotated[float, Field(ge=0, lt=1)] = 0.0,
) -> Scorer:
    """1.0 when the last number in the completion is the answer within either tolerance, else 0.0.

    Thousands separators (1,234.5), exponents (1e-3) and fractions (1/2) are read. A completion without a number is
    wrong: 0.0.
    """

    @deterministic
    def numeric(_prompt: str, completion: str, metadata: Metadata) -> float | ScorerFailure:
        answer = read_answer(metadata, answer_field)
        if isinstance(answer, ScorerFailure):
            return answer
        expected = whole_number(answer)
        if expected is None or not math.isfinite(expected):
            return metadata_failure(f"metadata.{answer_field} is {answer[:200]!r}, expected a finite number")
        given = last_number(completion)
        if given is None:
            return 0.0
        return float(is_close(given, expected, relative=relative_tolerance, absolute=absolute_tolerance))

    return numeric
