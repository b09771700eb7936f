"""Learning from which of two answers is preferred, without sampling."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from services.trainer.objective.metrics import Metrics, mean_of
from services.trainer.objective.types import LossOutputs


def dpo_loss(
    chosen: Float[Tensor, "pairs"],
    rejected: Float[Tensor, "pairs"],
    reference_chosen: Float[Tensor, "pairs"],
    reference_rejected: Float[Tensor, "pairs"],
    *,
    total_pairs: int,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> LossOutputs:
    """Σ −log σ(margin) / total_pairs, with margin = beta · ((chosen − its reference) − (rejected − its reference)).

    DPO, arXiv 2305.18290, equation 7. The pairs are this micro-batch's of the step's `total_pairs`; each number is the
    sum of a completion's log-probabilities. `label_smoothing` is the share of pairs that are labelled the wrong way
    round: (1 − it) · −log σ(margin) + it · −log σ(−margin), conservative DPO, E. Mitchell, "A note on DPO with noisy
    preferences and relationship to IPO", 2023.

    `loss` is a share of the step's, as compute_loss gives it. Metrics: total loss; means preference_accuracy (share of
    pairs with a positive margin, ties by half), preference_margin, chosen_reward and rejected_reward (beta · log-ratio
    to the reference); extremes of preference_margin.

    Raises ValueError that names the argument for a shape, a dtype or a number that is not what it says here.
    """
    _check_pairs(
        {
            "chosen": chosen,
            "rejected": rejected,
            "reference_chosen": reference_chosen,
            "reference_rejected": reference_rejected,
        },
        total_pairs,
    )
    if not beta > 0:
        raise ValueError(f"beta is {beta}, expected more than 0")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}, expected 0 or more and less than 0.5")
    chosen_reward = beta * (chosen - reference_chosen.detach())
    rejected_reward = beta * (rejected - reference_rejected.detach())
    margin = chosen_reward - rejected_reward
    losses = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    loss = losses.sum() / total_pairs
    widths = margin.detach().double()
    metrics = Metrics(
        totals={"loss": loss.detach().double()},
        means={
            "preference_accuracy": mean_of((widths.sign() + 1) / 2),
            "preference_margin": mean_of(widths),
            "chosen_reward": mean_of(chosen_reward),
            "rejected_reward": mean_of(rejected_reward),
        },
        minima={"preference_margin": widths.min()},
        maxima={"preference_margin": widths.max()},
    )
    return LossOutputs(loss=loss, metrics=metrics)


def _check_pairs(sums: dict[str, Tensor], total_pairs: int) -> None:
    shape = sums["chosen"].shape
    if len(shape) != 1 or shape[0] == 0:
        raise ValueError(f"chosen has shape {tuple(shape)}, expected one axis with at least one pair")
    for name, value in sums.items():
        if value.shape != shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {tuple(shape)}")
        if value.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name} has dtype {value.dtype}, expected torch.float32 or torch.float64")
        if not value.isfinite().all():
            raise ValueError(f"{name} holds NaN or infinity, expected finite numbers")
    if total_pairs < shape[0]:
        raise ValueError(f"total_pairs is {total_pairs}, expected at least the {shape[0]} of this micro-batch")
