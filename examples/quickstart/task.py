"""Sort the digits of a number, e.g. "sort 31415" gives "11345": easy to check, hard to guess."""

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

DIGITS = "0123456789"
LENGTH = 5


@dataclass(frozen=True)
class Problem:
    """One line of the JSONL files; `answer` is the reference of the exact_match scorer."""

    id: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class Preference:
    """One line of preferences.jsonl."""

    id: str
    prompt: str
    chosen: str
    rejected: str


def draw_problem(rng: np.random.Generator, name: str = "", *, length: int = LENGTH) -> Problem:
    """A uniformly drawn string of `length` digits."""
    digits = "".join(rng.choice(list(DIGITS), size=length))
    return Problem(name, f"sort {digits}", "".join(sorted(digits)))


def draw_split(
    rng: np.random.Generator, split: str, count: int, taken: Collection[str] = frozenset(), *, length: int = LENGTH
) -> list[Problem]:
    """`count` problems with distinct prompts, none of them in `taken`.

    Raises ValueError where `length` digits do not give twice as many: drawing would become slow.
    """
    available = len(DIGITS) ** length - len(taken)
    if 2 * count > available:
        raise ValueError(f"count is {count}, expected at most {available // 2}: half of the prompts not yet taken")
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = draw_problem(rng, f"{split}-{len(problems):05d}", length=length)
        if problem.prompt not in taken:
            problems.setdefault(problem.prompt, problem)
    return list(problems.values())


def imperfect_answer(answer: str, rng: np.random.Generator, *, forget_rate: float, typo_rate: float) -> str:
    """The answer of a careless demonstrator.

    With probability `forget_rate` one of the repeated digits is left out (a habit: where it is likelier than the right
    digit, greedy decoding is wrong too); with probability `typo_rate` one digit is replaced by another (noise).
    """
    digits = list(answer)
    repeats = [position for position in range(1, len(digits)) if digits[position] == digits[position - 1]]
    if repeats and rng.random() < forget_rate:
        del digits[rng.choice(repeats)]
    if rng.random() < typo_rate:
        position = int(rng.integers(len(digits)))
        digits[position] = str(rng.choice(list(DIGITS.replace(digits[position], ""))))
    return "".join(digits)


def draw_preferences(
    problems: Sequence[Problem], rng: np.random.Generator, *, forget_rate: float, typo_rate: float
) -> list[Preference]:
    """For each problem whose careless answer is wrong: the right answer is preferred to it."""
    pairs = []
    for problem in problems:
        careless = imperfect_answer(problem.answer, rng, forget_rate=forget_rate, typo_rate=typo_rate)
        if careless != problem.answer:
            pairs.append(Preference(problem.id, problem.prompt, problem.answer, careless))
    return pairs


def write_jsonl(path: Path, rows: Sequence[Problem] | Sequence[Preference]) -> None:
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")


def read_jsonl(path: Path) -> list[Problem]:
    return [Problem(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
