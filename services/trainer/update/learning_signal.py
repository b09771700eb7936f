"""Whether a run has anything to learn from: steps in a row whose rewards do not distinguish between answers."""

from collections.abc import Sequence

from trivet.v1 import sample_pb2

from services.common.config import Config
from services.common.logs import get_logger
from services.common.run_files.run_log import STEPS_WITHOUT_SIGNAL, WARNED_AFTER_STEPS
from services.trainer.batch.rewards import shaped_rewards
from services.trainer.objective import Algorithm
from services.trainer.update.algorithm import configured_algorithm

log = get_logger(__name__)


class LearningSignal:
    def __init__(self, config: Config) -> None:
        self._config = config
        algorithm = configured_algorithm(config)
        # A value head compares answers to different prompts, too.
        self._across_groups = isinstance(algorithm, Algorithm) and algorithm.value is not None
        self._steps = 0

    def observe(self, groups: Sequence[sample_pb2.ScoredGroup]) -> dict[str, float]:
        """The step metric of a step of these groups; warns when there have been many such steps in a row."""
        rewards = shaped_rewards(groups, self._config)
        compared = [[reward for group in rewards for reward in group]] if self._across_groups else rewards
        self._steps = 0 if any(len(set(group)) > 1 for group in compared) else self._steps + 1
        if self._steps and self._steps % WARNED_AFTER_STEPS == 0:
            log.warning(
                "nothing to learn: the answers of each prompt all have the same reward",
                steps_in_a_row=self._steps,
                rewards=sorted({reward for group in rewards for reward in group})[:5],
            )
        return {STEPS_WITHOUT_SIGNAL: float(self._steps)}
