"""One batch of preference pairs into optimizer steps. Every rank runs the same lines over its own micro-batches."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from services.common.config import Config
from services.common.errors import InvalidData
from services.trainer.configured import configured_algorithm
from services.trainer.engine import TrainEngine
from services.trainer.measurement import Measured, compare_with_sampler
from services.trainer.objective import LossOutputs, Metrics, PreferenceAlgorithm
from services.trainer.packing import MicroBatch, PackedBatch, pack, plan_microbatches
from services.trainer.pairs import Pair, pairs_of
from services.trainer.reference import Reference
from services.trainer.samples import TrainSample
from services.trainer.values import SAMPLER_AGAINST_TRAINER, Values, empty, split, step_values


class PreferenceUpdater:
    """Both answers of a pair lie in one micro-batch, side by side.

    Policy and reference see the same: the sampler's routing and candidate sets where the answers were sampled; their
    own routing and the whole vocabulary where the answers come from a file.
    """

    def __init__(self, config: Config, engine: TrainEngine, reference: Reference) -> None:
        """Raises InvalidData for a model whose packed sequences see each other."""
        if not engine.facts.packs:
            raise InvalidData(
                "packing_inexact",
                f"{engine.facts.model_type} mixes packed samples, but both answers of a pair go into one micro-batch: "
                "choose an algorithm that learns from rewards",
            )
        self._config, self._engine, self._reference = config, engine, reference

    def train(self, samples: Sequence[TrainSample]) -> Values:
        """Pairs the best with the worst of each group, the same on every rank, through all epochs and mini-batches.

        Groups without variance give no pair; without any pair there is no optimizer step (step_applied 0, pairs 0).
        """
        pairs = pairs_of(samples)
        if not pairs:
            return {"pairs": 0.0, "loss": 0.0, "grad_norm": 0.0, "step_applied": 0.0}
        algorithm = self._algorithm()
        first: Values = {}
        last: Values = {}
        for _ in range(self._config.trainer.epochs):
            for chunk in split(pairs, self._config.trainer.minibatches):
                last = self._optimizer_step(chunk, algorithm)
                first = first or last
        compared = {name: first[name] for name in SAMPLER_AGAINST_TRAINER if name in first}
        return {**last, **compared, "pairs": float(len(pairs))}

    def evaluate(self, samples: Sequence[TrainSample]) -> Values:
        """On held-out pairs, over all ranks: preference_accuracy (with its standard error), _margin and _loss."""
        pairs = pairs_of(samples)
        algorithm = self._algorithm()
        total: Metrics | None = None
        for plan in self._plan(pairs):
            batch = self._batch(plan, pairs)
            output = self._engine.logprobs(batch, keep_routing=self._keep_routing(batch))
            outputs = self._loss(algorithm, batch, output.logprobs, self._reference_logprobs(batch), len(pairs))
            metrics = outputs.metrics if plan.counts else empty(outputs.metrics)
            total = metrics if total is None else total + metrics
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

    def _optimizer_step(self, pairs: Sequence[Pair], algorithm: PreferenceAlgorithm) -> Values:
        total: Metrics | None = None
        measured: list[Measured] = []
        plans = self._plan(pairs)
        for position, plan in enumerate(plans):
            batch = self._batch(plan, pairs)
            reference = self._reference_logprobs(batch)
            output = self._engine.forward(batch, keep_routing=self._keep_routing(batch))
            outputs = self._loss(algorithm, batch, output.logprobs, reference, len(pairs))
            self._engine.backward(outputs.loss * float(plan.counts), last=position == len(plans) - 1)
            measured.append(Measured(plan, batch, output.detached(), reference))
            metrics = outputs.metrics if plan.counts else empty(outputs.metrics)
            total = metrics if total is None else total + metrics
        result = self._engine.step()
        assert total is not None
        values = {**total.reduce(self._engine.all_reduce).values(), **step_values(result)}
        if self._config.data.preferences is None:
            values |= compare_with_sampler(measured, self._engine)
        return values

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


def _answers(logprobs: Float[Tensor, "tokens"], batch: PackedBatch) -> tuple[Float[Tensor, "B"], Float[Tensor, "B"]]:
    """Summed over each answer's tokens: of the chosen and of the rejected."""
    sums = logprobs.new_zeros(len(batch.sample_ids)).index_add(0, batch.sequence_ids, logprobs)
    return sums[0::2], sums[1::2]
