"""Whether a run has permanently lost what it had learned, by its held-out scores and its training reward."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from services.common.config import Config
from services.common.run_files.held_out import Best, Score, best_score, comparable_scores, fallen

# Of the range of rewards: less is no fall, whatever its share.
LEAST_FALL = 0.1


class CollapseGuard:
    """Rank 0's. What it knows is in the run log, so it survives a restart."""

    def __init__(self, config: Config, evaluations: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]]) -> None:
        """`evaluations` and `steps` are those up to the step that the run resumes from."""
        self._settings = config.trainer.collapse
        reward = config.reward
        self._lowest, self._highest = (0.0, 1.0) if reward.normalize else (reward.minimum, reward.maximum)
        self._last: deque[float] = deque(maxlen=self._settings.reward_steps)
        self._best_mean: float | None = None
        self._scores = comparable_scores(evaluations)
        since = self._scores[0].step if self._scores else 0
        for entry in steps:
            if entry["step"] > since and "reward_mean" in entry["metrics"]:
                self.rewarded(entry["metrics"]["reward_mean"])

    @property
    def best(self) -> Score | None:
        return best_score(self._scores)

    @property
    def improved(self) -> bool:
        """Whether the last evaluation is better than every one before it."""
        before = best_score(self._scores[:-1])
        return bool(self._scores) and (before is None or self._scores[-1].value > before.value)

    def rewarded(self, reward: float) -> bool:
        """True when the mean of the last steps has fallen, so that the held-out prompts should be evaluated."""
        self._last.append(reward)
        if len(self._last) < self._settings.reward_steps:
            return False
        mean = sum(self._last) / len(self._last)
        self._best_mean = mean if self._best_mean is None else max(self._best_mean, mean)
        return self._reward_fell(mean, self._best_mean)

    def evaluated(self, evaluations: Sequence[dict[str, Any]]) -> str | None:
        """With a new evaluation among them: why the run should end, or None."""
        self._scores = comparable_scores(evaluations)
        settings, best = self._settings, self.best
        if not self._scores or best is None:
            return None
        lost = fallen(self._scores, settings.evaluation_share)
        reward = self._reward_reason()
        last = self._scores[-1]
        if reward is not None and not best.is_telling:
            return reward
        if reward is not None and last.value < settings.evaluation_share * best.value:
            return f"{reward}, and {self._score_reason([last])}"
        if reward is not None:
            # The prompts are harder now, or the scorer is: what was reached before is no measure any more.
            self._last.clear()
            self._best_mean = None
        return self._score_reason(lost) if len(lost) >= settings.evaluations else None

    def _reward_fell(self, mean: float, best: float) -> bool:
        share, span = self._settings.reward_share, self._highest - self._lowest
        return mean - self._lowest < share * (best - self._lowest) and best - mean > LEAST_FALL * span

    def _reward_reason(self) -> str | None:
        if self._best_mean is None or len(self._last) < self._settings.reward_steps:
            return None
        mean = sum(self._last) / len(self._last)
        if not self._reward_fell(mean, self._best_mean):
            return None
        return (
            f"the mean reward of {len(self._last)} steps fell from {self._best_mean:.3f} at its best to {mean:.3f} "
            "(trainer.collapse)"
        )

    def _score_reason(self, lost: Sequence[Score]) -> str:
        best = self.best
        assert best is not None
        values = ", ".join(f"{score.value:.3f}" for score in lost)
        steps = ", ".join(str(score.step) for score in lost)
        return (
            f"{best.label} fell from {best.value:.3f} at step {best.step} to {values} at step{'s' * (len(lost) > 1)} "
            f"{steps} (trainer.collapse)"
        )


def where_to_go_on(best: Best | None) -> str:
    """For the sentence that ends the run."""
    if best is None:
        return (
            "no checkpoint did better than the model that the run began with: start over with a configuration that "
            "moves it less"
        )
    return (
        f"the best checkpoint is {best.path} ({best.label} {best.score:.3f}): to resume from it, move the later ones "
        "away and change what made the run diverge (docs/resuming.md#the-best-checkpoint)"
    )
