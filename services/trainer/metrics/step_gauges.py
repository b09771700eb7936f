"""The values of a training step as Prometheus metrics: which value goes into which metric, by what name and unit.

A value keeps the name that it has in steps.jsonl in its metric's name, up to the unit and `statistic` labels. Only the
last step's values are exported: what a step does not report (the KL without a reference, routing of a dense model) has
no series, instead of a zero that nobody measured.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import REGISTRY, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.common.run_files.run_log import STEPS_WITHOUT_SIGNAL

PREFIX = "trivet_trainer_"
OTHER_VALUES_KEPT = 64


@dataclass(frozen=True)
class StepGauge:
    """`values` maps the name of a step's value to the value of `label`; without a label there is one value."""

    name: str
    help: str
    values: Mapping[str, str]
    label: str | None = None

    def family(self) -> GaugeMetricFamily:
        return GaugeMetricFamily(PREFIX + self.name, self.help, labels=[self.label] if self.label else [])


def _one(name: str, value: str, help_text: str) -> StepGauge:
    return StepGauge(name, help_text, {value: ""})


def _statistics(name: str, value: str, help_text: str, *statistics: str) -> StepGauge:
    """Of values named <value>_<statistic>; a distribution's mean has the bare name."""
    distribution = {value: "mean"} if "p50" in statistics else {}
    return StepGauge(name, help_text, distribution | {f"{value}_{each}": each for each in statistics}, "statistic")


QUANTILES = ("min", "p1", "p50", "p99", "p999", "max")

# Of the step's first optimizer step, before any update: where it is the only one, the same as of the whole step.
_FIRST = (
    _one("first_mismatch_kl_nats", "first_mismatch_kl", "KL of the trainer from the sampler (k3) before any update"),
    _statistics(
        "first_logprob_difference_nats",
        "first_logprob_difference",
        "Absolute difference of the trainer's and the sampler's log-probability of a token before any update",
        "mean",
        "max",
    ),
    _one(
        "first_sampler_ratio_mean",
        "first_sampler_ratio_mean",
        "Mean over tokens of trainer's over sampler's probability before any update",
    ),
    _statistics(
        "first_policy_ratio", "first_ratio", "Ratio of the current to the old policy before any update", *QUANTILES
    ),
    _one(
        "first_routing_agreement_ratio",
        "first_routing_agreement",
        "Share of the sampler's experts that the trainer would pick before any update",
    ),
)

STEP_GAUGES = (
    _one("loss", "loss", "Loss of the last step, all terms together"),
    StepGauge(
        "loss_term",
        "Summands of the loss, coefficients included",
        {f"{term}_loss": term for term in ("policy", "kl", "value", "entropy")},
        "term",
    ),
    _one("grad_norm", "grad_norm", "Norm of the gradient before clipping, mean over the step's optimizer steps"),
    _one("grad_norm_max", "grad_norm_max", "The largest such norm of the step's optimizer steps"),
    _one("learning_rate", "learning_rate", "Learning rate of the last step"),
    _one("kl_nats", "kl", "KL of the policy from the reference, mean over tokens"),
    _one("mismatch_kl_nats", "mismatch_kl", "KL of the trainer from the sampler (k3), mean over tokens"),
    _one("entropy_nats", "entropy", "Entropy of the policy over the candidate set, mean over tokens"),
    _statistics(
        "logprob_difference_nats",
        "logprob_difference",
        "Absolute difference of the trainer's and the sampler's log-probability of a token",
        "mean",
        "max",
    ),
    _one(
        "sampler_ratio_mean",
        "sampler_ratio_mean",
        "Mean over tokens of trainer's over sampler's probability, neither clipped nor weighted",
    ),
    _statistics("policy_ratio", "ratio", "Ratio of the current to the old policy, before clipping", *QUANTILES),
    _statistics(
        "importance_ratio",
        "importance_ratio",
        "Ratio of the old policy to the sampler, before its bounds",
        *QUANTILES,
    ),
    _one("importance_weight", "importance_weight", "Mean importance weight, bounds and calibration included"),
    _one("importance_calibration", "importance_calibration", "Calibration factor on the importance weight"),
    _one("clipped_tokens_ratio", "clip_fraction", "Share of tokens whose policy term is clipped"),
    _one(
        "masked_sequences_ratio",
        "masked_sequence_ratio",
        "Share of sequences that the off-policy mask left out of the policy term",
    ),
    _one(
        "masked_truncated_ratio",
        "truncated_fraction",
        "Share of sequences that were left out of the policy term because they were cut off",
    ),
    _one("routing_agreement_ratio", "routing_agreement", "Share of the sampler's experts that the trainer would pick"),
    *_FIRST,
    _one("candidate_set_tokens", "candidates_mean", "Tokens in a candidate set, mean over positions"),
    _statistics("reward", "reward", "Reward of the step's samples", "mean", "std"),
    _one(
        "groups_without_variance_ratio",
        "groups_without_variance",
        "Share of groups whose rewards are all the same, and so teach nothing",
    ),
    _one(
        "steps_without_signal",
        STEPS_WITHOUT_SIGNAL,
        "Steps in a row whose rewards did not distinguish between answers, so that nothing could be learned",
    ),
    _one("completion_tokens_mean", "length_mean", "Tokens of a completion, mean over the step's samples"),
    _one("truncated_samples_ratio", "truncated_ratio", "Share of samples that were cut off at sampling.max_tokens"),
    _statistics(
        "staleness_versions",
        "staleness",
        "Versions between the weights that sampled and those that were trained",
        "mean",
        "max",
    ),
    _one("value_mean", "value", "Value head's estimate, mean over tokens"),
    _one("return_mean", "return", "Return that the value head is taught, mean over tokens"),
    _one("clipped_values_ratio", "value_clip_fraction", "Share of tokens whose value term is clipped"),
    _one("preference_pairs", "pairs", "Pairs that the step was trained on"),
    _one(
        "preference_accuracy_ratio",
        "preference_accuracy",
        "Share of pairs whose chosen answer has the higher implicit reward",
    ),
    StepGauge(
        "preference_reward",
        "Implicit reward: beta times the log-ratio to the reference, mean over pairs",
        {"chosen_reward": "chosen", "rejected_reward": "rejected"},
        "answer",
    ),
    StepGauge(
        "preference_margin",
        "Implicit reward of the chosen less that of the rejected answer",
        {"preference_margin": "mean", "preference_margin_min": "min", "preference_margin_max": "max"},
        "statistic",
    ),
)

# Reported by another metric, and so without a gauge of their own.
REPORTED_ELSEWHERE = {
    "masked_fraction": "trivet_trainer_masked_sequences_ratio",
    "step_applied": "trivet_trainer_steps_skipped_total",
    "tokens": "trivet_trainer_tokens_total",
    "tokens_per_second": "trivet_trainer_tokens_total",
    "step_seconds": "trivet_trainer_step_seconds",
    "sampling_seconds": "trivet_rollout_sampling_seconds",
    **{
        f"{phase}_seconds": "trivet_trainer_phase_seconds"
        for phase in ("wait", "train", "publish", "record", "checkpoint", "evaluate")
    },
}

OTHER = StepGauge("other_value", "A value of the last step that only the run's own algorithm knows", {}, "name")

EVALUATION_GAUGES = (
    StepGauge(
        "evaluation_accuracy_ratio",
        "Share of held-out completions that are correct",
        {"greedy_accuracy": "greedy", "sampled_accuracy": "sampled"},
        "decoding",
    ),
    StepGauge(
        "evaluation_accuracy_error_ratio",
        "Standard error of that share, over prompts",
        {"greedy_accuracy_error": "greedy", "sampled_accuracy_error": "sampled"},
        "decoding",
    ),
    StepGauge(
        "evaluation_reward",
        "Mean reward of held-out completions",
        {"greedy_reward": "greedy", "sampled_reward": "sampled"},
        "decoding",
    ),
    StepGauge(
        "evaluation_completion_tokens",
        "Mean tokens of held-out completions",
        {"greedy_length": "greedy", "sampled_length": "sampled"},
        "decoding",
    ),
    _one("evaluation_failed_groups", "failures", "Held-out groups without a result in the last evaluation"),
    _one(
        "evaluation_preference_accuracy_ratio",
        "preference_accuracy",
        "Share of held-out pairs whose chosen answer has the higher implicit reward",
    ),
    _one("evaluation_preference_accuracy_error_ratio", "preference_accuracy_error", "Standard error of that share"),
    _one("evaluation_preference_margin", "preference_margin", "Margin of implicit rewards on held-out pairs, mean"),
    _one("evaluation_preference_loss", "preference_loss", "Loss on held-out pairs"),
)

DROPPED = Counter(
    "trivet_trainer_step_values_dropped_total", f"Values of steps beyond the {OTHER_VALUES_KEPT} of the run's own"
)


class ValueCollector(Collector):
    """The last values that were set, as the gauges of a table; the rest goes to `other`, up to a bound, by name."""

    def __init__(
        self, gauges: tuple[StepGauge, ...], *, skip: Iterable[str] = (), other: StepGauge | None = None
    ) -> None:
        self._gauges, self._skip, self._other = gauges, frozenset(skip), other
        self._known = {value for gauge in gauges for value in gauge.values} | self._skip
        self._values: Mapping[str, float] = {}

    def set(self, values: Mapping[str, float]) -> None:
        unknown = sorted(values.keys() - self._known)
        if self._other is not None:
            DROPPED.inc(len(unknown[OTHER_VALUES_KEPT:]))
        # One assignment: the server's thread reads while the main thread trains.
        self._values = dict(values)

    def describe(self) -> Iterable[Metric]:
        return [gauge.family() for gauge in (*self._gauges, *((self._other,) if self._other else ()))]

    def collect(self) -> Iterable[Metric]:
        values = self._values
        for gauge in self._gauges:
            family = gauge.family()
            for name, label in gauge.values.items():
                if name in values:
                    family.add_metric([label] if gauge.label else [], values[name])
            yield family
        if self._other is not None:
            family = self._other.family()
            for name in sorted(values.keys() - self._known)[:OTHER_VALUES_KEPT]:
                family.add_metric([name], values[name])
            yield family


STEP_VALUES = ValueCollector(STEP_GAUGES, skip=REPORTED_ELSEWHERE, other=OTHER)
EVALUATION_VALUES = ValueCollector(EVALUATION_GAUGES)
REGISTRY.register(STEP_VALUES)
REGISTRY.register(EVALUATION_VALUES)
