import functools
from collections.abc import Mapping
from typing import Any, Literal

import reasoning_gym as gym
from pydantic import validate_call

from services.reward.scorers.answer import metadata_failure
from services.reward.scorers.types import Metadata, Scorer, ScorerFailure, deterministic

# Their score_answer passes the completion to eval, directly or through sympy's parse_expr.
EVALUATING = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)

# They compare tuples, which JSON turns into lists.
LOST_IN_JSON = frozenset({"arc_agi", "rearc"})


@validate_call
def build(
    *,
    dataset: str | None = None,
    threshold: float | None = 1.0,
    strip: bool = True,
    unreadable: Literal["failure", "missing"] = "failure",
    trust_completions: bool = False,
) -> Scorer:
    """The score of the reasoning-gym task that made the row: metadata holds the row's `answer` and `metadata`.

    The task is `dataset`, or metadata.metadata.source_dataset. Tasks give wrong answers partial credit (0.01 to 0.8),
    so a score from `threshold` up is 1.0 and any other 0.0; threshold null passes the task's own score on.

    Some tasks raise on a completion that they cannot read. That is not a 0 by the task's word, so it is a failure;
    with unreadable="missing" the task itself is asked what no answer at all is worth (score_answer(None)).
    Tasks that evaluate the completion as Python code are refused unless trust_completions is set.
    arc_agi and rearc are refused: their rows do not survive JSON.
    """

    @deterministic
    def reasoning_gym(prompt: str, completion: str, metadata: Metadata) -> float | ScorerFailure:
        row = _row(prompt, metadata)
        if isinstance(row, ScorerFailure):
            return row
        name = dataset or row["metadata"].get("source_dataset")
        if name in LOST_IN_JSON:
            return metadata_failure(f"reasoning-gym's {name} calls a right answer wrong once its row has been JSON")
        if name in EVALUATING and not trust_completions:
            return ScorerFailure(
                f"reasoning-gym's {name} runs completions as Python code: set trust_completions to allow it",
                retryable=False,
            )
        task = _task(name)
        if isinstance(task, ScorerFailure):
            return task
        answer = completion.strip() if strip else completion
        try:
            score = float(task.score_answer(answer, row))
        except Exception as error:
            if unreadable == "missing":
                score = float(task.score_answer(None, row))
            else:
                raise UnreadableCompletion(f"reasoning-gym's {name} raised {type(error).__name__}: {error}") from error
        return score if threshold is None else float(score >= threshold)

    return reasoning_gym


class UnreadableCompletion(Exception):
    """The task raised on the completion instead of giving it a score."""


def _row(prompt: str, metadata: Metadata) -> dict[str, Any] | ScorerFailure:
    if not isinstance(metadata.get("answer"), str):
        return metadata_failure(f"metadata.answer is {metadata.get('answer')!r}, expected a reasoning-gym answer"[:300])
    details = metadata.get("metadata", metadata)
    if not isinstance(details, Mapping):
        return metadata_failure(f"metadata.metadata is {details!r}, expected a reasoning-gym row's metadata"[:300])
    return {"question": metadata.get("question", prompt), "answer": metadata["answer"], "metadata": dict(details)}


@functools.cache
def _task(name: str | None) -> Any:
    try:
        return gym.create_dataset(name, size=1, seed=0)
    except (ValueError, TypeError, AssertionError) as error:
        return metadata_failure(
            f"metadata.metadata.source_dataset is {name!r}, expected a reasoning-gym task ({error})"
        )
