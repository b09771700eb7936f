"""What a batch is compared with through all its epochs: the policy and value head before its first step."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from services.common.config.algorithm import AlgorithmConfig
from services.trainer.batch.packing import PackedBatch
from services.trainer.engine.protocol import PolicyOutput
from services.trainer.objective import generalized_advantages, terminal_rewards


@dataclass(frozen=True, eq=False)
class OldTokens:
    """Of one micro-batch; only `logprobs`, the ratio's denominator, is there without a value head."""

    logprobs: Float[Tensor, "tokens"]
    values: Float[Tensor, "tokens"] | None = None
    returns: Float[Tensor, "tokens"] | None = None
    advantages: Float[Tensor, "tokens"] | None = None

    @property
    def mean_advantage(self) -> Float[Tensor, ""]:
        """In float64. Raises ValueError without a value head."""
        if self.advantages is None:
            raise ValueError("advantages is missing, expected [tokens]: the algorithm's value head gave no values")
        return self.advantages.double().mean()

    def by_sample(self, batch: PackedBatch) -> "OldPolicy":
        return {
            sample_id: OldTokens(**{name: value[batch.sequence_ids == index] for name, value in _present(self).items()})
            for index, sample_id in enumerate(batch.sample_ids)
        }


OldPolicy = Mapping[str, OldTokens]  # by sample id


def old_tokens(
    batch: PackedBatch, output: PolicyOutput, rewards: Float[Tensor, "sequences"], settings: AlgorithmConfig
) -> OldTokens:
    """From the log-probs and values before the step. A sample's reward is paid on its last token."""
    logprobs = output.logprobs if settings.old_policy == "recomputed" else batch.rollout_logprobs
    if output.values is None:
        return OldTokens(logprobs)
    ids, sequences = batch.sequence_ids, len(batch.sample_ids)
    paid = terminal_rewards(rewards.to(output.values), ids, sequences)
    advantages, returns = generalized_advantages(
        paid, output.values, ids, sequences, settings.gamma, settings.gae_lambda
    )
    return OldTokens(logprobs, output.values, returns, advantages)


def gather(old: OldPolicy, batch: PackedBatch) -> OldTokens:
    """In the order of `batch`. Raises KeyError for a sample that is not in `old`."""
    parts = [_present(old[sample_id]) for sample_id in batch.sample_ids]
    return OldTokens(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})


def _present(tokens: OldTokens) -> dict[str, Tensor]:
    found = {field.name: getattr(tokens, field.name) for field in fields(tokens)}
    return {name: value for name, value in found.items() if value is not None}
