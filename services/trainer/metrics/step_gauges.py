"""Step metrics for Prometheus: which goes into which gauge.

A gauge's name is the prefix, the step metric's name in steps.jsonl and the unit; what only a `statistic` or `decoding`
tells apart shares a gauge. Only the last step's metrics are exported: what a step does not report (the KL without a
reference, routing of a dense model) has no series, instead of a zero that nobody measured.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import REGISTRY, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.common.run_files.run_log import STEPS_WITHOUT_SIGNAL

PREFIX = "trivet_trainer_"
OTHERS_KEPT = 64


@dataclass(frozen=True)
class StepGauge:
    """`labels` maps the name of a step metric to its `label`; without a label there is one of them."""

    name: str
    help: str
    labels: Mapping[str, str]
    label: str | None = None

    def family(self) -> GaugeMetricFamily:
        return GaugeMetricFamily(PREFIX + self.name, self.help, labels=[self.label] if self.label else [])


def _one(name: str, help_text: str, unit: str = "") -> StepGauge:
    return StepGauge(_with_unit(name, unit), help_text, {name: ""})


def _statistics(name: str, help_text: str, *statistics: str, unit: str = "") -> StepGauge:
    """Of step metrics named <name>_<statistic>."""
    return StepGauge(_with_unit(name, unit), help_text, {f"{name}_{each}": each for each in statistics}, "statistic")


def _distribution(name: str, help_text: str, *statistics: str) -> StepGauge:
    """The same of a distribution, whose mean has the bare name."""
    return StepGauge(name, help_text, {name: "mean"} | {f"{name}_{each}": each for each in statistics}, "statistic")


def _evaluated(name: str, help_text: str, unit: str = "") -> StepGauge:
    """Of a metric in evaluations.jsonl."""
    return StepGauge(_with_unit(f"evaluation_{name}", unit), help_text, {name: ""})


def _by_decoding(name: str, help_text: str, unit: str = "") -> StepGauge:
    """Of metrics in evaluations.jsonl named <decoding>_<name>."""
    labels = {f"{decoding}_{name}": decoding for decoding in ("greedy", "sampled")}
    return StepGauge(_with_unit(f"evaluation_{name}", unit), help_text, labels, "decoding")


def _with_unit(name: str, unit: str) -> str:
    return f"{name}_{unit}" if unit else name


QUANTILES = ("min", "p1", "p50", "p99", "p999", "max")

# Of the step's first optimizer step, before any update: where it is the only one, the same as of the whole step.
_FIRST = (
    _one("first_mismatch_kl", "KL of the trainer from the sampler (k3) before any update", "nats"),
    _statistics(
        "first_logprob_difference",
        "Absolute difference of the trainer's and the sampler's log-probability of a token before any update",
        "mean",
        "max",
        unit="nats",
    ),
    _one("first_sampler_ratio_mean", "Mean over tokens of trainer's over sampler's probability before any update"),
    _distribution("first_policy_ratio", "Ratio of the current to the old policy before any update", *QUANTILES),
    _one(
        "first_routing_agreement",
        "Share of the sampler's experts that the trainer would pick before any update",
        "ratio",
    ),
)

STEP_GAUGES = (
    _one("loss", "Loss of the last step, all terms together"),
    _one("policy_loss", "Policy term of the loss"),
    _one("kl_loss", "KL term of the loss, coefficient included"),
    _one("value_loss", "Value term of the loss, coefficient included"),
    _one("entropy_loss", "Entropy term of the loss, coefficient included"),
    _one("grad_norm", "Norm of the gradient before clipping, mean over the step's optimizer steps"),
    _one("grad_norm_max", "The largest such norm of the step's optimizer steps"),
    _one("learning_rate", "Learning rate of the last step"),
    _one("kl", "KL of the policy from the reference, mean over tokens", "nats"),
    _one("mismatch_kl", "KL of the trainer from the sampler (k3), mean over tokens", "nats"),
    _one("entropy", "Entropy of the policy over the candidate set, mean over tokens", "nats"),
    _statistics(
        "logprob_difference",
        "Absolute difference of the trainer's and the sampler's log-probability of a token",
        "mean",
        "max",
        unit="nats",
    ),
    _one(
        "sampler_ratio_mean", "Mean over tokens of trainer's over sampler's probability, neither clipped nor weighted"
    ),
    _distribution("policy_ratio", "Ratio of the current to the old policy, before clipping", *QUANTILES),
    _distribution("importance_ratio", "Ratio of the old policy to the sampler, before its bounds", *QUANTILES),
    _one("importance_weight", "Mean importance weight, bounds and calibration included"),
    _one("importance_calibration", "Calibration factor on the importance weight"),
    _one("clip_fraction", "Share of tokens whose policy term is clipped"),
    _one("masked_fraction", "Share of sequences that the sequence mask left out of the policy term"),
    _one(
        "routing_agreement",
        "Share of the sampler's experts that the trainer would pick",
        "ratio",
    ),
    *_FIRST,
    _one("candidate_set_size", "Tokens in a candidate set, mean over positions", "tokens"),
    _statistics("reward", "Reward of the step's samples", "mean", "std"),
    _one(
        "groups_without_variance",
        "Share of groups whose rewards are all the same, and so teach nothing",
        "ratio",
    ),
    _one(
        STEPS_WITHOUT_SIGNAL,
        "Steps in a row whose rewards did not distinguish between answers, so that nothing could be learned",
    ),
    _one("length_mean", "Tokens of a completion, mean over the step's samples", "tokens"),
    _one("truncated_fraction", "Share of samples that were cut off at sampling.max_tokens"),
    _statistics(
        "staleness",
        "Versions between the weights that sampled and those that were trained",
        "mean",
        "max",
        unit="versions",
    ),
    _one("value", "Value head's estimate, mean over tokens"),
    _one("return", "Return that the value head is taught, mean over tokens"),
    _one("value_clip_fraction", "Share of tokens whose value term is clipped"),
    _one("preference_pairs", "Pairs that the step was trained on"),
    _one(
        "preference_accuracy",
        "Share of pairs whose chosen answer has the higher implicit reward",
        "ratio",
    ),
    _one("chosen_reward", "Implicit reward of chosen answers: beta times the log-ratio to the reference, mean"),
    _one("rejected_reward", "Implicit reward of rejected answers: beta times the log-ratio to the reference, mean"),
    _distribution("preference_margin", "Implicit reward of the chosen less that of the rejected answer", "min", "max"),
)

# Reported by another metric, and so without a gauge of their own.
REPORTED_ELSEWHERE = {
    "step_applied": "trivet_trainer_steps_skipped_total",
    "tokens": "trivet_trainer_tokens_total",
    "tokens_per_second": "trivet_trainer_tokens_total",
    "step_seconds": "trivet_trainer_step_seconds",
    "sampling_seconds": "trivet_rollout_sampling_seconds",
    **{
        f"{phase}_seconds": "trivet_trainer_phase_seconds"
        for phase in ("wait", "train", "publish", "recording", "checkpoint", "evaluate")
    },
}

OTHER = StepGauge("other_metric", "A metric of the last step that only the run's own algorithm knows", {}, "name")

EVALUATION_GAUGES = (
    _by_decoding("accuracy", "Share of held-out completions that are correct", "ratio"),
    _by_decoding("accuracy_error", "Standard error of that share, over prompts", "ratio"),
    _by_decoding("reward", "Mean reward of held-out completions"),
    _by_decoding("length", "Mean tokens of held-out completions", "tokens"),
    _evaluated("failures", "Held-out groups without a result in the last evaluation"),
    _evaluated(
        "preference_accuracy", "Share of held-out pairs whose chosen answer has the higher implicit reward", "ratio"
    ),
    _evaluated("preference_accuracy_error", "Standard error of that share", "ratio"),
    _evaluated("preference_margin", "Margin of implicit rewards on held-out pairs, mean"),
    _evaluated("preference_loss", "Loss on held-out pairs"),
)

DROPPED = Counter(
    "trivet_trainer_step_metrics_dropped_total",
    f"Step metrics beyond the {OTHERS_KEPT} that a run's own algorithm may add",
)


class StepMetricCollector(Collector):
    """The step metrics that were set last, by a table of gauges; the rest goes to `other`, up to a bound, by name."""

    def __init__(
        self, gauges: tuple[StepGauge, ...], *, skip: Iterable[str] = (), other: StepGauge | None = None
    ) -> None:
        self._gauges, self._skip, self._other = gauges, frozenset(skip), other
        self._known = {name for gauge in gauges for name in gauge.labels} | self._skip
        self._metrics: Mapping[str, float] = {}

    def set(self, metrics: Mapping[str, float]) -> None:
        unknown = sorted(metrics.keys() - self._known)
        if self._other is not None:
            DROPPED.inc(len(unknown[OTHERS_KEPT:]))
        # One assignment: the server's thread reads while the main thread trains.
        self._metrics = dict(metrics)

    def describe(self) -> Iterable[Metric]:
        return [gauge.family() for gauge in (*self._gauges, *((self._other,) if self._other else ()))]

    def collect(self) -> Iterable[Metric]:
        metrics = self._metrics
        for gauge in self._gauges:
            family = gauge.family()
            for name, label in gauge.labels.items():
                if name in metrics:
                    family.add_metric([label] if gauge.label else [], metrics[name])
            yield family
        if self._other is not None:
            family = self._other.family()
            for name in sorted(metrics.keys() - self._known)[:OTHERS_KEPT]:
                family.add_metric([name], metrics[name])
            yield family


STEP_METRICS = StepMetricCollector(STEP_GAUGES, skip=REPORTED_ELSEWHERE, other=OTHER)
EVALUATION_METRICS = StepMetricCollector(EVALUATION_GAUGES)
REGISTRY.register(STEP_METRICS)
REGISTRY.register(EVALUATION_METRICS)
