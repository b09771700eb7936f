"""What the optimizer steps of one batch report together."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from services.common.run_files.run_log import FIRST
from services.trainer.engine.protocol import StepResult
from services.trainer.metrics.step_metrics import SAMPLER_AGAINST_TRAINER, StepMetrics
from services.trainer.objective import Metrics
from services.trainer.update.mismatch import SamplerComparison
from services.trainer.update.non_finite import Skipped


@dataclass(frozen=True, eq=False)
class OptimizerStep:
    """One of them, over all ranks. Without a result it was not taken: a number was not finite before the backward."""

    tokens: int
    skipped: Skipped | None
    result: StepResult | None = None
    metrics: Metrics | None = None
    compared: SamplerComparison | None = None

    @property
    def applied(self) -> bool:
        return self.result is not None and self.result.applied


def report(steps: Sequence[OptimizerStep]) -> StepMetrics:
    """Of the whole batch: means over all tokens, extremes and quantiles of all; loss and gradient norm are means of the
    optimizer steps that changed something, where any did.

    Of several, `first_…` is of the first one, before any update, where sampler and trainer can be compared.
    """
    whole = _step_metrics(steps)
    if len(steps) == 1:
        return whole
    first = _step_metrics(steps[:1])
    return whole | {f"{FIRST}{name}": first[name] for name in SAMPLER_AGAINST_TRAINER if name in first}


def _step_metrics(steps: Sequence[OptimizerStep]) -> StepMetrics:
    applied = [step for step in steps if step.applied] or steps
    return {"loss": math.nan, "grad_norm": math.nan} | {
        **_metrics(steps, applied),
        **_compared(steps),
        **_results(steps, applied),
    }


def _metrics(steps: Sequence[OptimizerStep], applied: Sequence[OptimizerStep]) -> StepMetrics:
    measured = [(step, step.metrics) for step in steps if step.metrics is not None]
    if not measured:
        return {}
    together = sum((metrics for _, metrics in measured[1:]), start=measured[0][1])
    if len(measured) > 1:
        counted = [pair for pair in measured if pair[0] in applied] or measured
        tokens = sum(step.tokens for step, _ in counted)
        together = replace(
            together,
            totals={
                name: sum((step.tokens / tokens * metrics.totals[name] for step, metrics in counted), start=zero)
                for name, zero in ((name, torch.zeros_like(total)) for name, total in together.totals.items())
            },
        )
    return together.values()


def _compared(steps: Sequence[OptimizerStep]) -> StepMetrics:
    measured = [step.compared for step in steps if step.compared is not None]
    return sum(measured[1:], start=measured[0]).values() if measured else {}


def _results(steps: Sequence[OptimizerStep], applied: Sequence[OptimizerStep]) -> StepMetrics:
    metrics: StepMetrics = {}
    taken = [step.result for step in steps if step.result is not None]
    if taken:
        norms = [step.result.grad_norm for step in applied if step.result is not None]
        metrics = {"grad_norm": math.fsum(norms) / len(norms), "learning_rate": taken[-1].learning_rate}
        if len(steps) > 1:
            metrics["grad_norm_max"] = max(norms)
    return {**metrics, "step_applied": sum(step.applied for step in steps) / len(steps)}
