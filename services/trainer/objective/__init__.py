"""The objective of Trivet: pure functions on tensors, free of engines, I/O and the rest of Trivet.

    objective = Objective(find_algorithm("grpo"), ImportanceCorrection("token_truncate"), KlPenalty(coef=0.001))
    outputs = compute_loss(LossInputs(...), objective)
    outputs.loss.backward()

`types` has the glossary, `loss` the formula; every other module is one noun of it.
"""

from services.trainer.objective.advantages import group_relative
from services.trainer.objective.algorithms import ALGORITHMS, Algorithm, find_algorithm
from services.trainer.objective.importance import ImportanceCorrection
from services.trainer.objective.kl import KlPenalty
from services.trainer.objective.loss import LossOutputs, Objective, compute_loss
from services.trainer.objective.metrics import Metrics
from services.trainer.objective.off_policy_mask import keep_sequences, sequence_divergence
from services.trainer.objective.policy_term import Clip, PolicyTerm
from services.trainer.objective.types import LossInputs

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Clip",
    "ImportanceCorrection",
    "KlPenalty",
    "LossInputs",
    "LossOutputs",
    "Metrics",
    "Objective",
    "PolicyTerm",
    "compute_loss",
    "find_algorithm",
    "group_relative",
    "keep_sequences",
    "sequence_divergence",
]
