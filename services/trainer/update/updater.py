"""What turns a batch into optimizer steps, whatever the algorithm learns from."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from services.common.config import Config
from services.trainer.batch.packing import MicroBatch, PackedBatch, pack, plan_microbatches
from services.trainer.batch.pairs import Pair
from services.trainer.batch.samples import TrainSample
from services.trainer.engine.protocol import UpdateEngine
from services.trainer.metrics.step_metrics import StepMetrics, split
from services.trainer.update.non_finite import Skipped
from services.trainer.update.optimizer_steps import OptimizerStep, report

Item = TypeVar("Item", TrainSample, Pair)


class Updater(ABC):
    """Every rank has one, and runs the same lines over its own micro-batches.

    Settings are read again at each batch, so that a change takes effect between two of them.
    """

    def __init__(self, config: Config, engine: UpdateEngine) -> None:
        self._config, self._engine = config, engine
        # Optimizer steps of the last batch that changed nothing; the same on every rank.
        self.skipped: list[Skipped] = []

    @abstractmethod
    def train(self, samples: Sequence[TrainSample]) -> StepMetrics:
        """All of a step's samples, the same on every rank; metrics of the whole step.

        A number that is not finite on any rank makes its optimizer step a skipped one on all.
        """

    def _take_steps(self, items: Sequence[Item], take: Callable[[Sequence[Item]], OptimizerStep]) -> StepMetrics:
        """One for each mini-batch of each epoch."""
        trainer = self._config.trainer
        return self._report([take(each) for _ in range(trainer.epochs) for each in split(items, trainer.minibatches)])

    def _report(self, steps: Sequence[OptimizerStep]) -> StepMetrics:
        self.skipped = [step.skipped for step in steps if step.skipped is not None]
        return report(steps)

    def _plan(self, items: Sequence[TrainSample] | Sequence[Pair]) -> list[MicroBatch]:
        """This rank's micro-batches of `items`: as many as any other rank has."""
        plans = plan_microbatches(
            [item.forward_length for item in items],
            self._config.trainer.tokens_per_microbatch,
            self._engine.world_size,
            max_sequences=None if self._engine.facts.packs else 1,
        )
        return plans[self._engine.rank]

    def _pack(self, samples: Sequence[TrainSample]) -> PackedBatch:
        batch = pack(samples).to(self._engine.device)
        return batch if self._config.rl_stability.consistency.keep_sampling_mask else batch.without_candidates()

    @property
    def _keep_routing(self) -> bool:
        """Answers from a file have no routing to keep."""
        sampled = self._config.data.preferences is None
        return self._config.rl_stability.consistency.keep_routing and sampled and self._engine.facts.moe_layers > 0
