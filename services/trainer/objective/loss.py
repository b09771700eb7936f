"""The objective: one policy term and one KL term, over one micro-batch of a step."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from services.trainer.objective.aggregation import token_weights
from services.trainer.objective.algorithms import Algorithm
from services.trainer.objective.importance import ImportanceCorrection, importance_ratio, importance_weights
from services.trainer.objective.kl import KlPenalty, k3, kl_estimate
from services.trainer.objective.metrics import Metrics, mean_of
from services.trainer.objective.types import LossInputs


@dataclass(frozen=True)
class Objective:
    algorithm: Algorithm
    importance: ImportanceCorrection
    kl: KlPenalty | None


@dataclass(frozen=True, eq=False)
class LossOutputs:
    """`loss` carries gradient and is this micro-batch's share of the step's loss: add shares up, never average them.

    Where the training engine averages gradients over ranks, multiply by the number of ranks.

    Metrics: totals loss, policy_loss, kl_loss; means ratio (before clipping), clip_fraction (of tokens),
    masked_fraction (of sequences), importance_ratio (before bounds), importance_weight (after),
    mismatch_kl (rollout ‖ current, nats per token), kl (current ‖ reference, nats per token; only with a KL term);
    extremes of ratio and importance_ratio.
    """

    loss: Float[Tensor, ""]
    metrics: Metrics


def compute_loss(inputs: LossInputs, objective: Objective) -> LossOutputs:
    """Σ share · (kept · w · policy term + coef · KL) over the tokens.

    The off-policy mask and the importance weight w touch only the policy term: a masked sequence's tokens still count
    in every denominator and are still held to the reference. Without reference log-probabilities there is no KL term.
    """
    algorithm, correction = objective.algorithm, objective.importance
    share = token_weights(inputs, algorithm.aggregation)
    term = algorithm.policy_term(inputs, algorithm.clip)
    mismatch = importance_ratio(
        inputs.old_logprobs, inputs.rollout_logprobs, inputs.sequence_ids, inputs.sequences, correction.mode
    )
    weight = importance_weights(mismatch, correction)
    kept = inputs.kept[inputs.sequence_ids]
    policy_loss = (share * kept * weight * term.loss).sum()

    ratio = term.ratio.detach()
    means = {
        "ratio": mean_of(ratio),
        "clip_fraction": mean_of(term.clipped),
        "masked_fraction": mean_of(~inputs.kept),
        "importance_ratio": mean_of(mismatch),
        "importance_weight": mean_of(weight),
        # k3 of (rollout, current): the samples are the rollout policy's.
        "mismatch_kl": mean_of(k3(inputs.rollout_logprobs, inputs.logprobs.detach())),
    }

    kl_loss = torch.zeros_like(policy_loss)
    if objective.kl is not None and inputs.reference_logprobs is not None:
        kl = kl_estimate(inputs.logprobs, inputs.old_logprobs, inputs.reference_logprobs, objective.kl)
        kl_loss = objective.kl.coef * (share * kl).sum()
        means["kl"] = mean_of(kl)

    loss = policy_loss + kl_loss
    losses = {"loss": loss, "policy_loss": policy_loss, "kl_loss": kl_loss}
    metrics = Metrics(
        totals={name: value.detach().double() for name, value in losses.items()},
        means=means,
        minima={"ratio": ratio.min().double(), "importance_ratio": mismatch.min().double()},
        maxima={"ratio": ratio.max().double(), "importance_ratio": mismatch.max().double()},
    )
    return LossOutputs(loss=loss, metrics=metrics)
