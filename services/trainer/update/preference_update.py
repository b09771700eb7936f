"""One batch of preference pairs into optimizer steps."""

import math
from collections.abc import Callable, Sequence
from functools import partial

from jaxtyping import Float
from torch import Tensor

from services.common.config import Config
from services.common.errors import InvalidData
from services.common.logs import get_logger
from services.trainer.batch.packing import MicroBatch, PackedBatch
from services.trainer.batch.pairs import Pair, pairs_of
from services.trainer.batch.samples import TrainSample
from services.trainer.engine.protocol import PolicyOutput, UpdateEngine
from services.trainer.metrics.step_metrics import StepMetrics, empty
from services.trainer.objective import LossOutputs, PreferenceAlgorithm
from services.trainer.objective.segments import segment_sum
from services.trainer.update.algorithm import configured_algorithm
from services.trainer.update.mismatch import Measured
from services.trainer.update.non_finite import FiniteCheck
from services.trainer.update.optimizer_steps import Forward, OptimizerStep, add_up, take_step
from services.trainer.update.reference import Reference
from services.trainer.update.updater import Updater

EVALUATED = ("preference_accuracy", "preference_accuracy_error", "preference_margin", "preference_loss")

log = get_logger(__name__)


class PreferenceUpdater(Updater):
    """Both answers of a pair lie in one micro-batch, side by side.

    Policy and reference see the same: the sampler's routing and candidate sets where the answers were sampled; their
    own routing and the whole vocabulary where the answers come from a file.
    """

    def __init__(self, config: Config, engine: UpdateEngine, reference: Reference) -> None:
        """Raises InvalidData for a model whose packed sequences see each other."""
        if not engine.facts.packs:
            raise InvalidData(
                "packing_inexact",
                f"{engine.facts.model_type} mixes packed samples, but both answers of a pair go into one micro-batch: "
                "choose an algorithm that learns from rewards",
            )
        super().__init__(config, engine)
        self._reference = reference

    def train(self, samples: Sequence[TrainSample]) -> StepMetrics:
        """Pairs the best with the worst of each group.

        Groups without variance give no pair; without any pair there is no optimizer step (step_applied 0,
        preference_pairs 0).
        """
        pairs = pairs_of(samples)
        if not pairs:
            self.skipped = []
            return {"preference_pairs": 0.0, "loss": 0.0, "grad_norm": 0.0, "step_applied": 0.0}
        metrics = self._take_steps(pairs, self._optimizer_step)
        return {**metrics, "preference_pairs": float(len(pairs))}

    def evaluate(self, samples: Sequence[TrainSample]) -> StepMetrics:
        """On held-out pairs, over all ranks: preference_accuracy (with its standard error), _margin and _loss.

        All are NaN where a number is not finite. Raises InvalidData where there is no pair.
        """
        pairs = pairs_of(samples)
        check, forwards = self._forwards(pairs, self._engine.logprobs)
        losses = [outputs for _, outputs in (forward() for forward in forwards) if outputs is not None]
        if (found := check.shared()) is not None:
            log.warning("evaluation is not finite", samples=found.samples)
            return dict.fromkeys(EVALUATED, math.nan)
        metrics = add_up([loss.metrics for loss in losses]).reduce(self._engine.all_reduce).values()
        accuracy = metrics["preference_accuracy"]
        return {
            "preference_accuracy": accuracy,
            "preference_accuracy_error": (accuracy * (1 - accuracy) / len(pairs)) ** 0.5,
            "preference_margin": metrics["preference_margin"],
            "preference_loss": metrics["loss"],
        }

    def _optimizer_step(self, pairs: Sequence[Pair]) -> OptimizerStep:
        check, forwards = self._forwards(pairs, self._engine.forward)
        return take_step(self._engine, check, forwards, compare=self._config.data.preferences is None)

    def _forwards(self, pairs: Sequence[Pair], run: Callable[..., PolicyOutput]) -> tuple[FiniteCheck, list[Forward]]:
        """Sequences 2i and 2i + 1 of a batch are the answers of its plan's i-th pair."""
        algorithm = configured_algorithm(self._config)
        assert isinstance(algorithm, PreferenceAlgorithm)
        check = FiniteCheck([sample for pair in pairs for sample in pair.samples], self._engine)

        def forward(plan: MicroBatch) -> tuple[Measured, LossOutputs | None]:
            batch = self._pack([sample for index in plan.indices for sample in pairs[index].samples])
            reference = self._reference.logprobs(batch, keep_routing=self._keep_routing)
            output = run(batch, keep_routing=self._keep_routing)
            micro = Measured(plan, batch, output, reference)
            if not _finite(check, batch, output.logprobs, reference, output.entropies):
                return micro, None
            outputs = algorithm.loss(
                *_answers(output.logprobs, batch),
                *_answers(reference, batch),
                total_pairs=len(pairs),
                beta=algorithm.beta,
                label_smoothing=algorithm.label_smoothing,
            )
            return micro, outputs if plan.counts else empty(outputs)

        return check, [partial(forward, plan) for plan in self._plan(pairs)]


def _finite(check: FiniteCheck, batch: PackedBatch, *numbers: Float[Tensor, "tokens"]) -> bool:
    """True where all are, and so are their sums over each answer."""
    sums = [segment_sum(each.detach(), batch.sequence_ids, len(batch.sample_ids)) for each in numbers]
    return check.numbers(batch, *numbers, *(each[batch.sequence_ids] for each in sums))


def _answers(
    logprobs: Float[Tensor, "tokens"], batch: PackedBatch
) -> tuple[Float[Tensor, "pairs"], Float[Tensor, "pairs"]]:
    """Summed over each answer's tokens: of the chosen and of the rejected."""
    sums = segment_sum(logprobs, batch.sequence_ids, len(batch.sample_ids))
    return sums[0::2], sums[1::2]
