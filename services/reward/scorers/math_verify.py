import logging
from typing import Any, Literal

from math_verify import parse, verify
from pydantic import validate_call

from services.reward.scorers.answer import metadata_failure, read_answer
from services.reward.scorers.types import Metadata, Scorer, ScorerFailure, deterministic


@validate_call
def build(*, answer_field: str = "answer", unreadable: Literal["failure", "missing"] = "failure") -> Scorer:
    """1.0 when the completion's final expression equals the answer mathematically, else 0.0 (math-verify's rules).

    A completion that holds no expression is wrong: 0.0. One that math-verify chokes on is another matter: it may be
    right. It is a failure, or with unreadable="missing" it counts as a completion without an expression.
    The answer is LaTeX, with or without its dollar signs.
    """
    # It warns once per process that its own timeouts are off: the pool has one, and kills.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    @deterministic
    def math_verify(_prompt: str, completion: str, metadata: Metadata) -> float | ScorerFailure:
        answer = read_answer(metadata, answer_field)
        if isinstance(answer, ScorerFailure):
            return answer
        gold = _parse_answer(answer)
        if isinstance(gold, ScorerFailure):
            return metadata_failure(f"metadata.{answer_field} is {answer[:200]!r}: {gold.reason}")
        try:
            given = parse(completion, parsing_timeout=None, raise_on_error=True)
            return float(verify(gold, given, timeout_seconds=None, raise_on_error=True))
        except Exception as error:
            if unreadable == "missing":
                return 0.0
            raise UnreadableCompletion(f"math-verify raised {type(error).__name__}") from error

    return math_verify


class UnreadableCompletion(Exception):
    """math-verify could neither read the completion nor say that it is wrong."""


def _parse_answer(answer: str) -> list[Any] | ScorerFailure:
    marked = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
    try:
        gold: list[Any] = parse(marked, parsing_timeout=None, raise_on_error=True)
    except Exception as error:  # noqa: BLE001 - sympy raises anything; all of it means that the row is unusable
        return ScorerFailure(f"math-verify cannot read it ({type(error).__name__})")
    return gold or ScorerFailure("math-verify finds no expression in it")
