"""One batch of scored groups into optimizer steps. Every rank runs the same lines over its own micro-batches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from services.common.config import Config
from services.trainer.engine import PolicyOutput, StepResult, TrainEngine
from services.trainer.objective import (
    Calibration,
    ImportanceCorrection,
    KlPenalty,
    LossInputs,
    Metrics,
    Objective,
    compute_loss,
    find_algorithm,
    keep_sequences,
    sequence_divergence,
)
from services.trainer.old_policy import OldPolicy, OldTokens, gather, old_tokens
from services.trainer.packing import MicroBatch, PackedBatch, pack, plan_microbatches
from services.trainer.reference import Reference
from services.trainer.samples import TrainSample

Values = dict[str, float]


@dataclass(frozen=True)
class Measured:
    """A micro-batch under the policy as it is before the optimizer step."""

    plan: MicroBatch
    batch: PackedBatch
    current: PolicyOutput
    reference_logprobs: Float[Tensor, "tokens"] | None


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
                    max_length=self._config.sampling.max_tokens,
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
            metrics = outputs.metrics if micro.plan.counts else _empty(outputs.metrics)
            total = metrics if total is None else total + metrics
        result = self._engine.step()
        assert total is not None
        return {
            **total.reduce(self._engine.all_reduce).values(),
            **self._comparison(measured),
            **_result(result),
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

    def _comparison(self, measured: Sequence[Measured]) -> Values:
        """Sampler against trainer before the step, over all ranks."""
        sums = torch.zeros(7, dtype=torch.float64)
        largest = torch.zeros(1, dtype=torch.float64)
        for micro in measured:
            if not micro.plan.counts:
                continue
            gap = (micro.current.logprobs - micro.batch.rollout_logprobs).double()
            agreement = micro.current.agreement
            compared = agreement.rows * len(agreement.agreeing) if agreement else 0
            sums += torch.tensor(
                [
                    gap.abs().sum(),
                    gap.exp().sum(),
                    micro.current.entropies.double().sum(),
                    gap.numel(),
                    sum(agreement.agreeing) if agreement else 0,
                    compared,
                    micro.batch.candidates.counts.sum() if micro.batch.candidates is not None else 0,
                ],
                dtype=torch.float64,
            )
            largest = torch.maximum(largest, gap.abs().max().cpu())
        gaps, ratios, entropies, tokens, agreeing, compared, candidates = self._engine.all_reduce(sums, "sum").tolist()
        values = {
            "logprob_difference_mean": gaps / tokens,
            "logprob_difference_max": self._engine.all_reduce(largest, "max").item(),
            "sampler_ratio_mean": ratios / tokens,
            "entropy": entropies / tokens,
        }
        if compared:
            values["routing_agreement"] = agreeing / compared
        if candidates:
            values["candidates_mean"] = candidates / tokens
        return values

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


# Metrics that compare the sampler with the trainer mean something only before the first update.
SAMPLER_AGAINST_TRAINER = (
    "logprob_difference_mean",
    "logprob_difference_max",
    "sampler_ratio_mean",
    "routing_agreement",
    "mismatch_kl",
    *(f"ratio{suffix}" for suffix in ("", "_min", "_max", "_p1", "_p50", "_p99", "_p999")),
)


def split(samples: Sequence[TrainSample], parts: int) -> list[Sequence[TrainSample]]:
    """Into `parts` mini-batches of consecutive samples, whose sizes differ by one at most."""
    size = math.ceil(len(samples) / parts)
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def build_objective(config: Config) -> Objective:
    """Raises ValueError for an unknown algorithm."""
    settings = config.algorithm
    chosen = find_algorithm(settings.name).override(
        settings.aggregation,
        settings.clip_low,
        settings.clip_high,
        settings.value_coef,
        settings.value_clip,
        settings.entropy_coef,
        settings.dynamic_sampling,
    )
    stability = config.rl_stability
    correction, calibration = stability.importance_sampling, stability.importance_sampling.calibration
    kl = stability.unbiased_kl
    return Objective(
        chosen,
        ImportanceCorrection(
            mode=correction.mode,
            clip_min=correction.clip_min,
            cap=correction.cap,
            calibration=Calibration(calibration.initial, calibration.decay_steps) if calibration else None,
        ),
        KlPenalty(estimator=kl.estimator, coef=kl.coef, ratio_clip=kl.clip_ratio)
        if stability.needs_reference
        else None,
    )


def _empty(metrics: Metrics) -> Metrics:
    """Of a repeat that only keeps the ranks in step."""
    return Metrics(
        totals={name: torch.zeros_like(value) for name, value in metrics.totals.items()},
        means={name: torch.zeros_like(value) for name, value in metrics.means.items()},
        minima={name: torch.full_like(value, math.inf) for name, value in metrics.minima.items()},
        maxima={name: torch.full_like(value, -math.inf) for name, value in metrics.maxima.items()},
    )


def _result(result: StepResult) -> Values:
    return {
        "grad_norm": result.grad_norm,
        "learning_rate": result.learning_rate,
        "step_applied": float(result.applied),
    }
