"""What the held-out scores of a run say: which was best, and whether the last ones have fallen far below it."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.common.run_files.atomic import write_atomically

BEST_FILE = "best.json"
# What an evaluation measures, in full.
SCORES = {
    "greedy_accuracy": "held-out accuracy, greedy",
    "sampled_accuracy": "held-out accuracy, sampled",
    "preference_accuracy": "held-out pairs, preferred one ahead",
}
LABELS = {"greedy_accuracy": "held-out accuracy", "preference_accuracy": "held-out pairs, preferred one ahead"}
# Among equal scores the one with the better of these is the better.
TIES = {"greedy_accuracy": "greedy_reward", "preference_accuracy": "preference_margin"}
# Standard errors that a fall must exceed. The best of hundreds of scores is far above their mean by chance alone.
CHANCE = 5.0
# Standard errors above 0 of a score from which a fall would show.
TELLING = 3.0


@dataclass(frozen=True)
class Score:
    step: int
    # A key of LABELS.
    name: str
    value: float
    error: float
    tie: float = 0.0

    @property
    def label(self) -> str:
        return LABELS[self.name]

    @property
    def is_telling(self) -> bool:
        """False where next to nothing was right, so that a fall would not show."""
        return self.value > TELLING * self.error

    def fell(self, best: "Score", share: float) -> bool:
        """Below `share` of the best one, and by more than chance."""
        return self.value < share * best.value and best.value - self.value > CHANCE * math.hypot(self.error, best.error)


@dataclass(frozen=True)
class Best:
    """The checkpoint that was kept for its score."""

    step: int
    label: str
    score: float
    path: Path


def comparable_scores(evaluations: Sequence[dict[str, Any]]) -> list[Score]:
    """Of the last entries of evaluations.jsonl that all ask the same: other prompts or rewards give other scores."""
    scores: list[Score] = []
    for entry in reversed(evaluations):
        if entry.get("asks") != evaluations[-1].get("asks"):
            break
        metrics = entry["metrics"]
        name = next((name for name in LABELS if name in metrics), None)
        if name is not None:
            tie = metrics.get(TIES[name], 0.0)
            scores.append(Score(entry["step"], name, metrics[name], metrics.get(f"{name}_error", 0.0), tie))
    return scores[::-1]


def best_score(scores: Sequence[Score]) -> Score | None:
    """The newest of the best."""
    return max(scores, key=lambda score: (score.value, score.tie, score.step), default=None)


def fallen(scores: Sequence[Score], share: float) -> list[Score]:
    """The last ones that have fallen below `share` of the best before them, without a good one between."""
    for index in range(len(scores) - 1, -1, -1):
        best = best_score(scores[:index])
        if best is None or not scores[index].fell(best, share):
            return list(scores[index + 1 :])
    return []


def write_best(checkpoints: Path, best: Best) -> None:
    write_atomically(checkpoints / BEST_FILE, json.dumps({**asdict(best), "path": best.path.name}))


def read_best(checkpoints: Path) -> Best | None:
    """None where none was kept, or it is no longer there."""
    try:
        content = json.loads((checkpoints / BEST_FILE).read_text(encoding="utf-8"))
        best = Best(int(content["step"]), str(content["label"]), float(content["score"]), checkpoints / content["path"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return best if best.path.is_dir() else None
