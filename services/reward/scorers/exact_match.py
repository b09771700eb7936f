from pydantic import validate_call

from services.reward.scorers.answer import read_answer
from services.reward.types import Metadata, Scorer, ScorerFailure, deterministic


@validate_call
def build(*, answer_field: str = "answer", strip: bool = True, ignore_case: bool = False) -> Scorer:
    """1.0 when the completion is the answer, else 0.0; `strip` drops white space around both first."""

    def normal(text: str) -> str:
        text = text.strip() if strip else text
        return text.casefold() if ignore_case else text

    @deterministic
    def exact_match(_prompt: str, completion: str, metadata: Metadata) -> float | ScorerFailure:
        answer = read_answer(metadata, answer_field)
        if isinstance(answer, ScorerFailure):
            return answer
        return float(normal(completion) == normal(answer))

    return exact_match
