"""One batch of scored groups into optimizer steps. Every rank runs the same lines over its own micro-batches."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor

from services.common.config import Config
from services.trainer.batch.packing import MicroBatch, PackedBatch, pack, plan_microbatches
from services.trainer.batch.samples import TrainSample
from services.trainer.engine.protocol import UpdateEngine
from services.trainer.metrics.step_metrics import StepMetrics, empty, split
from services.trainer.objective import LossInputs, Metrics, Objective, compute_loss, keep_sequences, sequence_divergence
from services.trainer.update.algorithm import build_objective
from services.trainer.update.mismatch import Measured, compare_with_sampler
from services.trainer.update.non_finite import FiniteCheck, Skipped, spoiled
from services.trainer.update.old_policy import OldPolicy, OldTokens, gather, old_tokens
from services.trainer.update.optimizer_steps import OptimizerStep, report
from services.trainer.update.reference import Reference


class Updater:
    """Settings are read again at each batch, so that a change takes effect between two of them."""

    def __init__(self, config: Config, engine: UpdateEngine, reference: Reference | None) -> None:
        self._config, self._engine, self._reference = config, engine, reference
        # Optimizer steps of the last batch that changed nothing; the same on every rank.
        self.skipped: list[Skipped] = []

    def train(self, samples: Sequence[TrainSample]) -> StepMetrics:
        """All of a step's samples, the same on every rank, through all epochs and mini-batches.

        A number that is not finite on any rank makes its optimizer step a skipped one on all. Returns metrics of the
        whole step.
        """
        config = self._config
        objective = build_objective(config)
        old: OldPolicy | None = None
        if objective.algorithm.value is not None or config.algorithm.old_policy == "recomputed":
            check = _check(samples, self._engine)
            old = self._old_policy(samples, check)
            if (skipped := check.shared()) is not None:
                return self._report([_left_out(samples, skipped)])
        if objective.algorithm.value is not None:
            samples = self._with_advantages(samples, old or {})
        return self._report(
            [
                self._optimizer_step(chunk, old, objective)
                for _ in range(config.trainer.epochs)
                for chunk in split(samples, config.trainer.minibatches)
            ]
        )

    def _report(self, steps: Sequence[OptimizerStep]) -> StepMetrics:
        self.skipped = [step.skipped for step in steps if step.skipped is not None]
        return report(steps)

    def _optimizer_step(
        self, samples: Sequence[TrainSample], old: OldPolicy | None, objective: Objective
    ) -> OptimizerStep:
        check = _check(samples, self._engine)
        measured = [self._measure(plan, samples, check) for plan in self._plan(samples)]
        if (skipped := check.shared()) is not None:
            return _left_out(samples, skipped)
        kept = self._keep(samples, measured)
        rewards_entropy = objective.algorithm.entropy_coef > 0
        tokens = sum(len(sample.token_ids) for sample in samples)
        total: Metrics | None = None
        for position, micro in enumerate(measured):
            batch = micro.batch
            output = self._engine.forward(batch, keep_routing=self._keep_routing, entropy_gradient=rewards_entropy)
            before = OldTokens(batch.rollout_logprobs) if old is None else gather(old, batch)
            last = position == len(measured) - 1
            if not check.numbers(batch, output.logprobs, output.entropies, output.values):
                self._engine.backward(spoiled(output), last=last)
                continue
            outputs = compute_loss(
                LossInputs(
                    logprobs=output.logprobs,
                    old_logprobs=before.logprobs,
                    rollout_logprobs=batch.rollout_logprobs,
                    reference_logprobs=micro.reference_logprobs,
                    sequence_ids=batch.sequence_ids,
                    advantages=batch.advantages,
                    kept=kept[torch.tensor(micro.plan.indices, device=kept.device)],
                    total_tokens=tokens,
                    total_sequences=len(samples),
                    # As they were sampled; one constant for all where sampling.max_tokens changed meanwhile.
                    max_length=max(sample.max_tokens for sample in samples),
                    truncated=batch.truncated if self._config.algorithm.mask_truncated else None,
                    steps_applied=self._engine.steps_applied,
                    entropies=output.entropies if rewards_entropy else None,
                    values=output.values,
                    old_values=before.values,
                    returns=before.returns,
                    gae_advantages=before.advantages,
                ),
                objective,
            )
            finite = check.loss(batch, outputs.loss)
            loss = outputs.loss * float(micro.plan.counts) if finite else spoiled(output)
            self._engine.backward(loss, last=last)
            metrics = outputs.metrics if micro.plan.counts else empty(outputs.metrics)
            total = metrics if total is None else total + metrics
        result = self._engine.step()
        skipped = check.shared() or (None if result.applied else check.gradient())
        # A rank whose forward was not finite has no metrics, and every rank knows that now.
        if skipped is not None and skipped.reason == "forward":
            total = None
        return OptimizerStep(
            tokens=tokens,
            skipped=skipped,
            result=result,
            metrics=None if total is None else total.reduce(self._engine.all_reduce),
            compared=compare_with_sampler(measured, self._engine),
        )

    def _measure(self, plan: MicroBatch, samples: Sequence[TrainSample], check: FiniteCheck) -> Measured:
        batch = self._batch(plan, samples)
        reference = None
        if self._reference is not None and self._config.rl_stability.needs_reference:
            reference = self._reference.logprobs(batch, keep_routing=self._keep_routing)
        current = self._engine.logprobs(batch, keep_routing=self._keep_routing)
        advantages = batch.advantages[batch.sequence_ids]
        check.numbers(batch, current.logprobs, current.entropies, current.values, reference, advantages)
        return Measured(plan, batch, current, reference)

    def _batch(self, plan: MicroBatch, samples: Sequence[TrainSample]) -> PackedBatch:
        batch = pack([samples[index] for index in plan.indices]).to(self._engine.device)
        keeps = self._config.rl_stability.consistency.keep_sampling_mask
        return batch if keeps else batch.without_candidates()

    def _keep(self, samples: Sequence[TrainSample], measured: Sequence[Measured]) -> Bool[Tensor, "sequences"]:
        """Over the sequences of all ranks: the mask keeps a share of the whole step."""
        masking = self._config.rl_stability.sequence_masking
        device = self._engine.device
        if not masking.enabled:
            return torch.ones(len(samples), dtype=torch.bool, device=device)
        divergence = torch.zeros(len(samples), dtype=torch.float64, device=device)
        for micro in measured:
            if micro.plan.counts:
                batch = micro.batch
                divergence[list(micro.plan.indices)] = sequence_divergence(
                    micro.current.logprobs.double(),
                    batch.rollout_logprobs.double(),
                    batch.sequence_ids,
                    len(batch.sample_ids),
                )
        divergence = self._engine.all_reduce(divergence, "sum")
        advantages = torch.tensor([sample.advantage for sample in samples], dtype=torch.float64, device=device)
        return keep_sequences(advantages, divergence, masking.divergence_threshold, masking.min_keep_ratio)

    def _old_policy(self, samples: Sequence[TrainSample], check: FiniteCheck) -> OldPolicy:
        """Of this rank's share of every mini-batch, without what `check` finds not finite."""
        old: dict[str, OldTokens] = {}
        for chunk in split(samples, self._config.trainer.minibatches):
            for plan in self._plan(chunk):
                batch = self._batch(plan, chunk)
                output = self._engine.logprobs(batch, keep_routing=self._keep_routing)
                rewards = torch.tensor([chunk[index].reward for index in plan.indices], dtype=torch.float64)
                rewards = rewards.to(output.logprobs)
                if not check.numbers(batch, output.logprobs, output.values, rewards[batch.sequence_ids]):
                    continue
                tokens = old_tokens(batch, output, rewards, self._config.algorithm)
                check.numbers(batch, tokens.logprobs, tokens.returns, tokens.advantages)
                old |= tokens.by_sample(batch)
        return old

    def _with_advantages(self, samples: Sequence[TrainSample], old: OldPolicy) -> list[TrainSample]:
        """Each sample's advantage is the mean of its tokens': the sequence mask wants one of every sequence."""
        shares = torch.zeros(len(samples), 2, dtype=torch.float64, device=self._engine.device)
        for index, sample in enumerate(samples):
            if sample.sample_id in old:
                shares[index, 0], shares[index, 1] = old[sample.sample_id].mean_advantage, 1
        # A repeat that only keeps the ranks in step puts its samples on several ranks.
        sums, ranks = self._engine.all_reduce(shares, "sum").unbind(1)
        means = (sums / ranks).tolist()
        return [replace(sample, advantage=mean) for sample, mean in zip(samples, means, strict=True)]

    def _plan(self, samples: Sequence[TrainSample]) -> list[MicroBatch]:
        plans = plan_microbatches(
            [sample.forward_length for sample in samples],
            self._config.trainer.tokens_per_microbatch,
            self._engine.world_size,
            max_sequences=None if self._engine.facts.packs else 1,
        )
        return plans[self._engine.rank]

    @property
    def _keep_routing(self) -> bool:
        return self._config.rl_stability.consistency.keep_routing and self._engine.facts.moe_layers > 0


def _check(samples: Sequence[TrainSample], engine: UpdateEngine) -> FiniteCheck:
    return FiniteCheck([sample.sample_id for sample in samples], engine)


def _left_out(samples: Sequence[TrainSample], skipped: Skipped) -> OptimizerStep:
    """Before any rank went forward with gradients, so that none goes backward."""
    return OptimizerStep(sum(len(sample.token_ids) for sample in samples), skipped)
