"""Whether a run may continue after a step: its weights are finite, and not too many steps in a row changed nothing."""

from collections.abc import Sequence

from services.common.errors import GaveUp
from services.common.logs import get_logger
from services.trainer.engine.protocol import TrainEngine
from services.trainer.metrics import counters
from services.trainer.metrics.step_metrics import StepMetrics
from services.trainer.update.non_finite import Skipped

SAMPLES_NAMED = 8

log = get_logger(__name__)


class Soundness:
    """Every rank has one, and all come to the same verdict."""

    def __init__(self, engine: TrainEngine, max_skipped: int) -> None:
        self._engine, self._max_skipped = engine, max_skipped
        self._skipped_in_a_row = 0
        self._last: Skipped | None = None

    def check(self, metrics: StepMetrics, skipped: Sequence[Skipped]) -> bool:
        """Of the step that was just trained: True where its weights are fit to be published. Collective."""
        for each in skipped:
            counters.STEPS_SKIPPED.labels(each.reason).inc()
            log.warning("step skipped: a number was not finite", reason=each.reason, samples=named_samples(each))
            self._last = each
        if metrics["step_applied"]:
            self._skipped_in_a_row = 0
            return self._engine.finite()
        # A batch without a pair takes no step either, and nothing is wrong with it.
        self._skipped_in_a_row += bool(skipped)
        return True

    def refuse(self, step: int, fit: bool, checkpoint: str | None) -> None:
        """Raises GaveUp where no further step can help. `checkpoint` is the newest one."""
        saved = f"the newest checkpoint is {checkpoint}" if checkpoint else "there is no checkpoint yet"
        if self._engine.rank != 0:
            saved = "rank 0 names the newest checkpoint"
        if not fit:
            raise GaveUp(
                "weights_not_finite",
                f"step {step} left weights that are not finite or larger than float16 holds: nothing of it was "
                f"published or saved, and {saved}. "
                "Lower trainer.optimizer.learning_rate before you start it again",
            )
        if self._last is not None and self._skipped_in_a_row > self._max_skipped:
            raise GaveUp(
                "too_many_skipped_steps",
                f"{self._skipped_in_a_row} steps in a row changed nothing because a number was not finite, at most "
                f"{self._max_skipped} allowed (trainer.max_skipped_steps); in the last one the {self._last.reason} of "
                f"{', '.join(named_samples(self._last))}; {saved}",
            )


def named_samples(skipped: Skipped) -> list[str]:
    """The first few of its samples; steps.jsonl has all."""
    more = len(skipped.samples) - SAMPLES_NAMED
    return [*skipped.samples[:SAMPLES_NAMED], *([f"and {more} more"] if more > 0 else [])]
