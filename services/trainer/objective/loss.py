"""The objective: a policy term and what an algorithm adds to it, over one micro-batch of a step."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from services.trainer.objective.algorithms import Algorithm
from services.trainer.objective.importance import ImportanceCorrection, importance_log_ratio, importance_weights
from services.trainer.objective.kl import KlPenalty, kl_estimate, wide_k3
from services.trainer.objective.metrics import Metrics, distribution_of, mean_of
from services.trainer.objective.scaled import log_of, scaled_weights, wide_exp
from services.trainer.objective.types import Aggregation, LossInputs, LossOutputs
from services.trainer.objective.value import ValueLoss, value_term


def token_weights(inputs: LossInputs, aggregation: Aggregation) -> Float[Tensor, "tokens"]:
    """The share of each token in the step's loss: Σ weight·value over all micro-batches and ranks is

    token_mean      Σ value / tokens                    (DAPO, arXiv 2503.14476, section 3.3)
    sequence_mean   Σ mean over the sequence / sequences  (GRPO, arXiv 2402.03300, equation 3)
    fixed_length    Σ value / (sequences · max_length)  (Dr. GRPO, arXiv 2503.20783, section 3.2)
    """
    match aggregation:
        case "token_mean":
            return torch.full_like(inputs.rollout_logprobs, 1 / inputs.total_tokens)
        case "sequence_mean":
            lengths = inputs.lengths[inputs.sequence_ids].to(inputs.rollout_logprobs.dtype)
            return 1 / (lengths * inputs.total_sequences)
        case "fixed_length":
            return torch.full_like(inputs.rollout_logprobs, 1 / (inputs.total_sequences * inputs.max_length))


@dataclass(frozen=True)
class Objective:
    algorithm: Algorithm
    importance: ImportanceCorrection
    kl: KlPenalty | None


@dataclass(frozen=True, eq=False)
class Term:
    """One summand of the loss by its name, its coefficient included, and what else to say of it."""

    loss: Float[Tensor, ""]
    means: dict[str, Tensor]


def compute_loss(inputs: LossInputs, objective: Objective) -> LossOutputs:
    """Σ share · (kept · w · policy term + c_v · value term − c_e · entropy + coef · KL) over the tokens.

    The sequence mask, the mask of truncated sequences and the importance weight w touch only the policy term: a
    masked sequence's tokens still count in every denominator and in the KL, and still teach the value head. Without
    reference log-probabilities there is no KL term, without a value head no value term, and without an entropy
    coefficient no bonus.

    A token that is clipped, masked or given weight 0 touches neither loss nor gradient, whatever its ratio. A product
    that is finite is so here where one of its factors overflows.

    Metrics: totals loss and its summands policy_loss, kl_loss, value_loss, entropy_loss (the last two only where the
    term is); means policy_ratio (before clipping), clip_fraction (of tokens), masked_fraction (of sequences, by the
    sequence mask), truncated_fraction (of sequences, where they are masked), importance_ratio (before bounds),
    importance_weight (after, calibration included), importance_calibration (with it), mismatch_kl (rollout ‖ current,
    nats per token), kl (current ‖ reference, nats per token), value, return, value_clip_fraction (of tokens), entropy
    (nats per token); extremes and quantiles of policy_ratio and importance_ratio.

    Raises ValueError that names the field which the objective needs and `inputs` lacks.
    """
    share = token_weights(inputs, objective.algorithm.aggregation)
    policy = objective.algorithm.policy_term(inputs, objective.algorithm.clip)
    log_mismatch = importance_log_ratio(
        inputs.old_logprobs, inputs.rollout_logprobs, inputs.sequence_ids, inputs.sequences, objective.importance.mode
    )
    factor = _calibration(inputs, objective.importance)
    weight, log_weight = importance_weights(log_mismatch, objective.importance)
    if factor is not None:
        weight, log_weight = weight * factor, log_weight + log_of(factor)
    kept = _kept(inputs)[inputs.sequence_ids]
    scale = share * kept * weight
    if policy.log_scale is not None:
        scale = scaled_weights(scale, (share * kept).log() + log_weight, policy.log_scale)
    policy_loss = (scale * policy.loss.where(scale > 0, 0.0)).sum()

    ratio, mismatch = policy.ratio.detach(), wide_exp(log_mismatch)
    means = {
        "policy_ratio": distribution_of(ratio),
        "clip_fraction": mean_of(policy.clipped),
        "masked_fraction": mean_of(~inputs.kept),
        "importance_ratio": distribution_of(mismatch),
        "importance_weight": mean_of(weight),
        # k3 of (rollout, current): the samples are the rollout policy's.
        "mismatch_kl": mean_of(wide_k3(inputs.rollout_logprobs, inputs.logprobs)),
    }
    if inputs.truncated is not None:
        means["truncated_fraction"] = mean_of(inputs.truncated)
    if factor is not None:
        means["importance_calibration"] = mean_of(weight.new_full((1,), factor))

    terms = {"policy_loss": Term(policy_loss, means), "kl_loss": _kl_term(inputs, share, objective.kl)}
    if objective.algorithm.value is not None:
        terms["value_loss"] = _value_term(inputs, share, objective.algorithm.value)
    if objective.algorithm.entropy_coef > 0:
        terms["entropy_loss"] = _entropy_term(inputs, share, objective.algorithm.entropy_coef)

    losses = {name: term.loss for name, term in terms.items()}
    loss = sum(losses.values(), start=torch.zeros_like(policy_loss))
    metrics = Metrics(
        totals={name: value.detach().double() for name, value in ({"loss": loss} | losses).items()},
        means={name: mean for term in terms.values() for name, mean in term.means.items()},
        minima={"policy_ratio": ratio.min().double(), "importance_ratio": mismatch.min().double()},
        maxima={"policy_ratio": ratio.max().double(), "importance_ratio": mismatch.max().double()},
    )
    return LossOutputs(loss=loss, metrics=metrics)


def _kept(inputs: LossInputs) -> Bool[Tensor, "sequences"]:
    return inputs.kept if inputs.truncated is None else inputs.kept & ~inputs.truncated


def _calibration(inputs: LossInputs, correction: ImportanceCorrection) -> float | None:
    if correction.calibration is None:
        return None
    if inputs.steps_applied is None:
        raise ValueError("steps_applied is missing, expected a number: the importance weights are calibrated by it")
    return correction.calibration.factor(inputs.steps_applied)


def _kl_term(inputs: LossInputs, share: Float[Tensor, "tokens"], penalty: KlPenalty | None) -> Term:
    if penalty is None or inputs.reference_logprobs is None:
        return Term(share.new_zeros(()), {})
    kl = kl_estimate(inputs.logprobs, inputs.old_logprobs, inputs.reference_logprobs, penalty)
    far = kl.log_scale > 0
    loss = penalty.coef * (share * kl.value.where(~far, 0.0)).sum()
    scale = (share.log() + log_of(penalty.coef) + kl.log_scale).where(far, -math.inf).exp()
    return Term(loss + (scale * kl.value).sum(), {"kl": mean_of(kl.wide)})


def _value_term(inputs: LossInputs, share: Float[Tensor, "tokens"], settings: ValueLoss) -> Term:
    values, old_values, returns = (
        inputs.require(name, "the algorithm trains a value head") for name in ("values", "old_values", "returns")
    )
    term = value_term(values, old_values, returns, settings.clip)
    means = {"value": mean_of(values), "return": mean_of(returns), "value_clip_fraction": mean_of(term.clipped)}
    return Term(settings.coef * (share * term.loss).sum(), means)


def _entropy_term(inputs: LossInputs, share: Float[Tensor, "tokens"], coef: float) -> Term:
    entropies = inputs.require("entropies", "entropy_coef is above 0")
    if inputs.logprobs.requires_grad and not entropies.requires_grad:
        raise ValueError("entropies carries no gradient, expected one: without it the entropy bonus teaches nothing")
    return Term(-coef * (share * entropies).sum(), {"entropy": mean_of(entropies)})
