from pydantic import validate_call

from services.reward.scorers.answer import read_answer
from services.reward.scorers.number import whole_number
from services.reward.scorers.types import Metadata, Scorer, ScorerFailure, deterministic


@validate_call
def build(*, answer_field: str = "answer", strip: bool = True, ignore_case: bool = False) -> Scorer:
    """1.0 when the completion is the answer, else 0.0; `strip` drops white space around both first.

    An answer that is a number in the row (42.0, not "42.0") is right in any spelling: 42, 42.0, 4.2e1.
    """

    def normal(text: str) -> str:
        text = text.strip() if strip else text
        return text.casefold() if ignore_case else text

    @deterministic
    def exact_match(_prompt: str, completion: str, metadata: Metadata) -> float | ScorerFailure:
        answer = read_answer(metadata, answer_field)
        if isinstance(answer, ScorerFailure):
            return answer
        given = normal(completion)
        if given == normal(answer):
            return 1.0
        if isinstance(metadata[answer_field], str) or given != given.strip():
            return 0.0
        number = whole_number(given)
        return float(number is not None and number == whole_number(answer))

    return exact_match
