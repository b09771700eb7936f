"""The objective of Trivet: pure functions on tensors, free of engines, I/O and the rest of Trivet.

    objective = Objective(find_algorithm("grpo"), ImportanceCorrection("token_truncate"), KlPenalty(coef=0.001))
    outputs = compute_loss(LossInputs(...), objective)
    outputs.loss.backward()

`types` has the glossary, `loss` the formula; every other module is one noun of it.
"""

from services.trainer.objective.advantages import (
    best_against_worst,
    group_relative,
    groups_with_variance,
    overlong_penalty,
)
from services.trainer.objective.algorithms import ALGORITHMS, Algorithm, PreferenceAlgorithm, find_algorithm
from services.trainer.objective.dpo import dpo_loss
from services.trainer.objective.gae import generalized_advantages, terminal_rewards
from services.trainer.objective.importance import Calibration, ImportanceCorrection
from services.trainer.objective.kl import KlPenalty
from services.trainer.objective.loss import Objective, compute_loss
from services.trainer.objective.metrics import QUANTILES, Metrics, histogram_of, quantiles_of
from services.trainer.objective.policy_term import (
    Clip,
    PolicyTerm,
    cispo_term,
    clipped_term,
    sequence_log_ratio,
    token_log_ratio,
)
from services.trainer.objective.sequence_mask import keep_sequences, sequence_divergence
from services.trainer.objective.types import LossInputs, LossOutputs
from services.trainer.objective.value import ValueLoss

__all__ = [
    "ALGORITHMS",
    "QUANTILES",
    "Algorithm",
    "Calibration",
    "Clip",
    "ImportanceCorrection",
    "KlPenalty",
    "LossInputs",
    "LossOutputs",
    "Metrics",
    "Objective",
    "PolicyTerm",
    "PreferenceAlgorithm",
    "ValueLoss",
    "best_against_worst",
    "cispo_term",
    "clipped_term",
    "compute_loss",
    "dpo_loss",
    "find_algorithm",
    "generalized_advantages",
    "group_relative",
    "groups_with_variance",
    "histogram_of",
    "keep_sequences",
    "overlong_penalty",
    "quantiles_of",
    "sequence_divergence",
    "sequence_log_ratio",
    "terminal_rewards",
    "token_log_ratio",
]
