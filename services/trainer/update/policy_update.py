"""One batch of scored groups into optimizer steps."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool
from torch import Tensor

from services.common.config import Config
from services.trainer.batch.packing import MicroBatch, PackedBatch
from services.trainer.batch.samples import TrainSample
from services.trainer.engine.protocol import UpdateEngine
from services.trainer.metrics.step_metrics import StepMetrics, empty, split
from services.trainer.objective import (
    LossInputs,
    LossOutputs,
    Objective,
    compute_loss,
    keep_sequences,
    sequence_divergence,
)
from services.trainer.update.algorithm import build_objective
from services.trainer.update.mismatch import Measured, compare_with_sampler
from services.trainer.update.non_finite import FiniteCheck
from services.trainer.update.old_policy import OldPolicy, OldTokens, gather, old_tokens
from services.trainer.update.optimizer_steps import OptimizerStep, take_step
from services.trainer.update.reference import Reference
from services.trainer.update.updater import Updater


class PolicyUpdater(Updater):
    """Learns from the rewards of scored groups."""

    def __init__(self, config: Config, engine: UpdateEngine, reference: Reference | None) -> None:
        super().__init__(config, engine)
        self._reference = reference

    def train(self, samples: Sequence[TrainSample]) -> StepMetrics:
        config = self._config
        objective = build_objective(config)
        old: OldPolicy | None = None
        if objective.algorithm.value is not None or config.algorithm.old_policy == "recomputed":
            check = FiniteCheck(samples, self._engine)
            old = self._old_policy(samples, check)
            if (skipped := check.shared()) is not None:
                return self._report([OptimizerStep(samples, skipped)])
        if objective.algorithm.value is not None:
            samples = self._with_advantages(samples, old or {})
        return self._take_steps(samples, partial(self._optimizer_step, old=old, objective=objective))

    def _optimizer_step(
        self, samples: Sequence[TrainSample], old: OldPolicy | None, objective: Objective
    ) -> OptimizerStep:
        check = FiniteCheck(samples, self._engine)
        measured = [self._measure(plan, samples, check) for plan in self._plan(samples)]
        if (skipped := check.shared()) is not None:
            # Before any rank went forward with gradients, so that none goes backward.
            return OptimizerStep(samples, skipped)
        kept = self._keep(samples, measured)
        forwards = [partial(self._forward, micro, kept, check, old, objective) for micro in measured]
        step = take_step(self._engine, check, forwards)
        return replace(step, compared=compare_with_sampler(measured, self._engine))

    def _measure(self, plan: MicroBatch, samples: Sequence[TrainSample], check: FiniteCheck) -> Measured:
        batch = self._batch(plan, samples)
        reference = None
        if self._reference is not None and self._config.rl_stability.needs_reference:
            reference = self._reference.logprobs(batch, keep_routing=self._keep_routing)
        current = self._engine.logprobs(batch, keep_routing=self._keep_routing)
        advantages = batch.advantages[batch.sequence_ids]
        check.numbers(batch, current.logprobs, current.entropies, current.values, reference, advantages)
        return Measured(plan, batch, current, reference)

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
                    micro.output.logprobs.double(),
                    batch.rollout_logprobs.double(),
                    batch.sequence_ids,
                    len(batch.sample_ids),
                )
        divergence = self._engine.all_reduce(divergence, "sum")
        advantages = torch.tensor([sample.advantage for sample in samples], dtype=torch.float64, device=device)
        return keep_sequences(advantages, divergence, masking.divergence_threshold, masking.min_keep_ratio)

    def _forward(
        self,
        micro: Measured,
        kept: Bool[Tensor, "sequences"],
        check: FiniteCheck,
        old: OldPolicy | None,
        objective: Objective,
    ) -> tuple[Measured, LossOutputs | None]:
        batch, rewards_entropy = micro.batch, objective.algorithm.entropy_coef > 0
        output = self._engine.forward(batch, keep_routing=self._keep_routing, entropy_gradient=rewards_entropy)
        forwarded = replace(micro, output=output)
        if not check.numbers(batch, output.logprobs, output.entropies, output.values):
            return forwarded, None
        before = OldTokens(batch.rollout_logprobs) if old is None else gather(old, batch)
        inputs = LossInputs(
            logprobs=output.logprobs,
            old_logprobs=before.logprobs,
            rollout_logprobs=batch.rollout_logprobs,
            reference_logprobs=micro.reference_logprobs,
            sequence_ids=batch.sequence_ids,
            advantages=batch.advantages,
            kept=kept[torch.tensor(micro.plan.indices, device=kept.device)],
            total_tokens=sum(len(sample.token_ids) for sample in check.samples),
            total_sequences=len(check.samples),
            # As they were sampled; one constant for all where sampling.max_tokens changed meanwhile.
            max_length=max(sample.max_tokens for sample in check.samples),
            truncated=batch.truncated if self._config.algorithm.mask_truncated else None,
            steps_applied=self._engine.steps_applied,
            entropies=output.entropies if rewards_entropy else None,
            values=output.values,
            old_values=before.values,
            returns=before.returns,
            gae_advantages=before.advantages,
        )
        outputs = compute_loss(inputs, objective)
        return forwarded, outputs if micro.plan.counts else empty(outputs)

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

    def _batch(self, plan: MicroBatch, samples: Sequence[TrainSample]) -> PackedBatch:
        return self._pack([samples[index] for index in plan.indices])
