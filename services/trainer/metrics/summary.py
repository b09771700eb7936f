import math
import statistics

from trivet.v1 import sample_pb2, step_pb2

from services.trainer.batch.rewards import has_variance

STEP_PHASES = ("wait", "train", "publish")


def summarize(
    order: step_pb2.StepOrder, version: int, phases: dict[str, float], *, sampled: bool = True
) -> dict[str, float]:
    """What a step was made of: rewards, lengths, staleness (in versions), and seconds by phase.

    `version` is the one that the step started from. What was not sampled has neither rewards nor versions.
    """
    samples = [sample for scored in order.groups for sample in scored.group.samples]
    tokens = sum(len(sample.token_ids) for sample in samples)
    # Evaluations and checkpoints are not part of what a step costs.
    seconds = sum(spent for phase, spent in phases.items() if phase in STEP_PHASES)
    return {
        **(_sampling(order, samples, version) if sampled else {}),
        "length_mean": tokens / len(samples),
        "tokens": float(tokens),
        "tokens_per_second": tokens / seconds if seconds else 0.0,
        "step_seconds": seconds,
        **{f"{phase}_seconds": spent for phase, spent in phases.items()},
    }


def _sampling(order: step_pb2.StepOrder, samples: list[sample_pb2.Sample], version: int) -> dict[str, float]:
    flat = [score.reward for scored in order.groups for score in scored.scores]
    staleness = [version - span.version for sample in samples for span in sample.versions]
    # Neither overflows where its result does not.
    mean, freedom = statistics.mean(flat), math.sqrt(max(1, len(flat) - 1))
    return {
        "reward_mean": mean,
        "reward_std": math.hypot(*((reward - mean) / freedom for reward in flat)),
        "groups_without_variance": sum(not has_variance(scored) for scored in order.groups) / len(order.groups),
        "truncated_fraction": sum(sample.finish_reason == sample_pb2.FINISH_REASON_LENGTH for sample in samples)
        / len(samples),
        "staleness_mean": sum(staleness) / max(1, len(staleness)),
        "staleness_max": float(max(staleness, default=0)),
        "sampling_seconds": sum(scored.group.sampling_seconds for scored in order.groups) / len(order.groups),
    }
