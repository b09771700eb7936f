"""One batch of preference pairs into optimizer steps. Every rank runs the same lines over its own micro-batches."""

import math
from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from services.common.config import Config
from services.common.errors import InvalidData
from services.common.logs import get_logger
from services.trainer.batch.packing import MicroBatch, PackedBatch, pack, plan_microbatches
from services.trainer.batch.pairs import Pair, pairs_of
from services.trainer.batch.samples import TrainSample
from services.trainer.engine.protocol import UpdateEngine
from services.trainer.metrics.step_metrics import StepMetrics, empty, split
from services.trainer.objective import LossOutputs, Metrics, PreferenceAlgorithm
from services.trainer.objective.segments import segment_sum
from services.trainer.update.algorithm import configured_algorithm
from services.trainer.update.mismatch import Measured, compare_with_sampler
from services.trainer.update.non_finite import FiniteCheck, Skipped, spoiled
from services.trainer.update.optimizer_steps import OptimizerStep, report
from services.trainer.update.reference import Reference

EVALUATED = ("preference_accuracy", "preference_accuracy_error", "preference_margin", "preference_loss")

log = get_logger(__name__)


class PreferenceUpdater:
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
        self._config, self._engine, self._reference = config, engine, reference
        # Optimizer steps of the last batch that changed nothing; the same on every rank.
        self.skipped: list[Skipped] = []

    def train(self, samples: Sequence[TrainSample]) -> StepMetrics:
        """Pairs the best with the worst of each group, the same on every rank, through all epochs and mini-batches.

        Groups without variance give no pair; without any pair there is no optimizer step (step_applied 0,
        preference_pairs 0). A number that is not finite on any rank makes its optimizer step a skipped one on all.
        """
        self.skipped = []
        pairs = pairs_of(samples)
        if not pairs:
            return {"preference_pairs": 0.0, "loss": 0.0, "grad_norm": 0.0, "step_applied": 0.0}
        algorithm = self._algorithm()
        steps = [
            self._optimizer_step(chunk, algorithm)
            for _ in range(self._config.trainer.epochs)
            for chunk in split(pairs, self._config.trainer.minibatches)
        ]
        self.skipped = [step.skipped for step in steps if step.skipped is not None]
        return {**report(steps), "preference_pairs": float(len(pairs))}

    def evaluate(self, samples: Sequence[TrainSample]) -> StepMetrics:
        """On held-out pairs, over all ranks: preference_accuracy (with its standard error), _margin and _loss.

        All are NaN where a log-prob is not finite.
        """
        pairs = pairs_of(samples)
        algorithm = self._algorithm()
        check = _check(pairs, self._engine)
        total: Metrics | None = None
        for plan in self._plan(pairs):
            batch = self._batch(plan, pairs)
            output = self._engine.logprobs(batch, keep_routing=self._keep_routing(batch))
            reference = self._reference_logprobs(batch)
            if not _finite(check, batch, output.logprobs, reference):
                continue
            outputs = self._loss(algorithm, batch, output.logprobs, reference, len(pairs))
            metrics = outputs.metrics if plan.counts else empty(outputs.metrics)
            total = metrics if total is None else total + metrics
        if (found := check.shared()) is not None:
            log.warning("evaluation is not finite", samples=found.samples)
            return dict.fromkeys(EVALUATED, math.nan)
        if total is None:
            raise InvalidData("data_empty", "there is no held-out pair to evaluate, expected at least one")
        values = total.reduce(self._engine.all_reduce).values()
        accuracy = values["preference_accuracy"]
        return {
            "preference_accuracy": accuracy,
            "preference_accuracy_error": (accuracy * (1 - accuracy) / len(pairs)) ** 0.5,
            "preference_margin": values["preference_margin"],
            "preference_loss": values["loss"],
        }

    def _optimizer_step(self, pairs: Sequence[Pair], algorithm: PreferenceAlgorithm) -> OptimizerStep:
        check = _check(pairs, self._engine)
        total: Metrics | None = None
        measured: list[Measured] = []
        plans = self._plan(pairs)
        for position, plan in enumerate(plans):
            batch = self._batch(plan, pairs)
            reference = self._reference_logprobs(batch)
            output = self._engine.forward(batch, keep_routing=self._keep_routing(batch))
            last = position == len(plans) - 1
            if not _finite(check, batch, output.logprobs, reference, output.entropies):
                self._engine.backward(spoiled(output), last=last)
                continue
            outputs = self._loss(algorithm, batch, output.logprobs, reference, len(pairs))
            finite = check.loss(batch, outputs.loss)
            loss = outputs.loss * float(plan.counts) if finite else spoiled(output)
            self._engine.backward(loss, last=last)
            measured.append(Measured(plan, batch, output.detached(), reference))
            metrics = outputs.metrics if plan.counts else empty(outputs.metrics)
            total = metrics if total is None else total + metrics
        result = self._engine.step()
        skipped = check.shared() or (None if result.applied else check.gradient())
        # A rank whose forward was not finite has no metrics, and every rank knows that now.
        complete = skipped is None or skipped.reason != "forward"
        return OptimizerStep(
            tokens=sum(len(sample.token_ids) for pair in pairs for sample in (pair.chosen, pair.rejected)),
            skipped=skipped,
            result=result,
            metrics=total.reduce(self._engine.all_reduce) if total is not None and complete else None,
            compared=compare_with_sampler(measured, self._engine)
            if complete and self._config.data.preferences is None
            else None,
        )

    def _loss(
        self,
        algorithm: PreferenceAlgorithm,
        batch: PackedBatch,
        logprobs: Float[Tensor, "tokens"],
        reference: Float[Tensor, "tokens"],
        total_pairs: int,
    ) -> LossOutputs:
        chosen, rejected = _answers(logprobs, batch)
        reference_chosen, reference_rejected = _answers(reference, batch)
        return algorithm.loss(
            chosen,
            rejected,
            reference_chosen,
            reference_rejected,
            total_pairs=total_pairs,
            beta=algorithm.beta,
            label_smoothing=algorithm.label_smoothing,
        )

    def _plan(self, pairs: Sequence[Pair]) -> list[MicroBatch]:
        """Indices are of pairs."""
        lengths = [pair.forward_length for pair in pairs]
        plans = plan_microbatches(lengths, self._config.trainer.tokens_per_microbatch, self._engine.world_size)
        return plans[self._engine.rank]

    def _batch(self, plan: MicroBatch, pairs: Sequence[Pair]) -> PackedBatch:
        """Sequences 2i and 2i + 1 are the answers of the plan's i-th pair."""
        chosen = [pairs[index] for index in plan.indices]
        batch = pack([sample for pair in chosen for sample in (pair.chosen, pair.rejected)]).to(self._engine.device)
        keeps = self._config.rl_stability.consistency.keep_sampling_mask
        return batch if keeps else batch.without_candidates()

    def _reference_logprobs(self, batch: PackedBatch) -> Float[Tensor, "tokens"]:
        return self._reference.logprobs(batch, keep_routing=self._keep_routing(batch))

    def _keep_routing(self, batch: PackedBatch) -> bool:
        return self._config.rl_stability.consistency.keep_routing and batch.routing is not None

    def _algorithm(self) -> PreferenceAlgorithm:
        found = configured_algorithm(self._config)
        assert isinstance(found, PreferenceAlgorithm)
        return found


def _check(pairs: Sequence[Pair], engine: UpdateEngine) -> FiniteCheck:
    return FiniteCheck([sample.sample_id for pair in pairs for sample in (pair.chosen, pair.rejected)], engine)


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
