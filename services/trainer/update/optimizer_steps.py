"""How one optimizer step is taken, and what those of one batch report together."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from services.common.run_files.run_log import FIRST
from services.trainer.batch.samples import TrainSample
from services.trainer.engine.protocol import StepResult, UpdateEngine
from services.trainer.metrics.step_metrics import SAMPLER_AGAINST_TRAINER, StepMetrics
from services.trainer.objective import LossOutputs, Metrics
from services.trainer.update.mismatch import Measured, SamplerComparison, compare_with_sampler
from services.trainer.update.non_finite import FiniteCheck, Skipped, spoiled


@dataclass(frozen=True, eq=False)
class OptimizerStep:
    """One of them, over all ranks. Without a result it was not taken: a number was not finite before the backward."""

    samples: Sequence[TrainSample]
    skipped: Skipped | None
    result: StepResult | None = None
    # None where a forward was not finite: the rank that it ran on lacks its share.
    metrics: Metrics | None = None
    compared: SamplerComparison | None = None

    @property
    def tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def applied(self) -> bool:
        return self.result is not None and self.result.applied


# A micro-batch as it went forward with gradients, and its loss if all of its numbers were finite.
Forward = Callable[[], tuple[Measured, LossOutputs | None]]


def take_step(
    engine: UpdateEngine, check: FiniteCheck, forwards: Sequence[Forward], *, compare: bool = False
) -> OptimizerStep:
    """Of one forward for each micro-batch of this rank; each goes backward before the next one. Collective.

    `compare` is for samples whose log-probs under sampler and trainer nothing has compared before the step.
    """
    metrics: list[Metrics] = []
    measured: list[Measured] = []
    for number, forward in enumerate(forwards, start=1):
        micro, outputs = forward()
        if outputs is not None:
            metrics.append(outputs.metrics)
            measured.append(replace(micro, output=micro.output.detached()))
        loss = outputs.loss if outputs is not None and check.loss(micro.batch, outputs.loss) else spoiled(micro.output)
        engine.backward(loss, last=number == len(forwards))
    result = engine.step()
    skipped = check.shared() or (None if result.applied else check.gradient())
    if skipped is not None and skipped.reason == "forward":
        return OptimizerStep(check.samples, skipped, result)
    total = add_up(metrics).reduce(engine.all_reduce)
    return OptimizerStep(
        check.samples, skipped, result, total, compare_with_sampler(measured, engine) if compare else None
    )


def add_up(metrics: Sequence[Metrics]) -> Metrics:
    """Of at least one."""
    return sum(metrics[1:], start=metrics[0])


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
    together = add_up([metrics for _, metrics in measured])
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
