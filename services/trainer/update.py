"""One batch of scored groups into optimizer steps. Every rank runs the same lines over its own micro-batches."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor

from services.common.config import Config
from services.trainer.configured import build_objective
from services.trainer.engine import TrainEngine
from services.trainer.measurement import Measured, compare_with_sampler
from services.trainer.objective import LossInputs, Metrics, Objective, compute_loss, keep_sequences, sequence_divergence
from services.trainer.old_policy import OldPolicy, OldTokens, gather, old_tokens
from services.trainer.packing import MicroBatch, PackedBatch, pack, plan_microbatches
from services.trainer.reference import Reference
from services.trainer.samples import TrainSample
from services.trainer.values import SAMPLER_AGAINST_TRAINER, Values, empty, split, step_values


class Updater:
    """Settings are read anew at each batch, so that a change takes effect between two of them."""

    def __init__(self, config: Config, engine: TrainEngine, reference: Reference | None) -> None:
        self._config, self._engine, self._reference = config, engine, reference

    def train(self, samples: Sequence[TrainSample]) -> Values:
        """All of a step's samples, the same on every rank, through all epochs and mini-batches.

        Returns metrics of the whole step: those of the first optimizer step tell how far sampler and trainer are apart.
        """
        config = self._config
        objective = build_objective(config)
        old: OldPolicy | None = None
        if objective.algorithm.value is not None:
            old = self._old_policy(samples)
            samples = self._judged(samples, old)
        elif config.algorithm.old_policy == "recomputed":
            old = self._old_policy(samples)
        first: Values = {}
        last: Values = {}
        for _ in range(config.trainer.epochs):
            for chunk in split(samples, config.trainer.minibatches):
                last = self._optimizer_step(chunk, old, objective)
                first = first or last
        return {**last, **{name: first[name] for name in SAMPLER_AGAINST_TRAINER if name in first}}

    def _optimizer_step(self, samples: Sequence[TrainSample], old: OldPolicy | None, objective: Objective) -> Values:
        measured = [self._measure(plan, samples) for plan in self._plan(samples)]
        kept = self._keep(samples, measured)
        rewards_entropy = objective.algorithm.entropy_coef > 0
        tokens = sum(len(sample.token_ids) for sample in samples)
        total: Metrics | None = None
        for position, micro in enumerate(measured):
            batch = micro.batch
            output = self._engine.forward(batch, keep_routing=self._keep_routing, entropy_gradient=rewards_entropy)
            before = OldTokens(batch.rollout_logprobs) if old is None else gather(old, batch)
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
            counts = float(micro.plan.counts)
            self._engine.backward(outputs.loss * counts, last=position == len(measured) - 1)
            metrics = outputs.metrics if micro.plan.counts else empty(outputs.metrics)
            total = metrics if total is None else total + metrics
        result = self._engine.step()
        assert total is not None
        return {
            **total.reduce(self._engine.all_reduce).values(),
            **compare_with_sampler(measured, self._engine),
            **step_values(result),
            "masked_sequence_ratio": 1 - kept.double().mean().item(),
        }

    def _measure(self, plan: MicroBatch, samples: Sequence[TrainSample]) -> Measured:
        batch = self._batch(plan, samples)
        reference = None
        if self._reference is not None and self._config.rl_stability.needs_reference:
            reference = self._reference.logprobs(batch, keep_routing=self._keep_routing)
        return Measured(plan, batch, self._engine.logprobs(batch, keep_routing=self._keep_routing), reference)

    def _batch(self, plan: MicroBatch, samples: Sequence[TrainSample]) -> PackedBatch:
        batch = pack([samples[index] for index in plan.indices]).to(self._engine.device)
        keeps = self._config.rl_stability.consistency.keep_sampling_mask
        return batch if keeps else batch.without_candidates()

    def _keep(self, samples: Sequence[TrainSample], measured: Sequence[Measured]) -> Bool[Tensor, "samples"]:
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

    def _old_policy(self, samples: Sequence[TrainSample]) -> OldPolicy:
        """Of this rank's share of every mini-batch."""
        old: dict[str, OldTokens] = {}
        for chunk in split(samples, self._config.trainer.minibatches):
            for plan in self._plan(chunk):
                batch = self._batch(plan, chunk)
                output = self._engine.logprobs(batch, keep_routing=self._keep_routing)
                rewards = torch.tensor([chunk[index].reward for index in plan.indices], device=self._engine.device)
                old |= old_tokens(batch, output, rewards, self._config.algorithm).by_sample(batch)
        return old

    def _judged(self, samples: Sequence[TrainSample], old: OldPolicy) -> list[TrainSample]:
        """Each sample's advantage is the mean of its tokens': the off-policy mask wants one of every sequence."""
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
