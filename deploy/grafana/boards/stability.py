"""Are sampler and trainer one policy, and does the policy stay in bounds."""

from board import Board, Panel, Query, Row, Threshold

from boards.parts import RUN, alarm, each, last, lines

SAMPLER: tuple[Panel, ...] = (
    lines(
        "Mean ratio of trainer to sampler",
        "Mean over tokens of the trainer's over the sampler's probability before any update, neither clipped nor "
        "weighted. 1 when both are the same policy; an alert fires outside 0.8 to 1.2.",
        "none",
        last("trivet_trainer_first_sampler_ratio_mean", "ratio"),
        thresholds=(Threshold(None, "red"), Threshold(0.8, "green"), Threshold(1.2, "red")),
        alerts=("sampler-ratio-off",),
    ),
    lines(
        "KL between sampler and trainer",
        "k3 estimate in nats a token, before the step's first update. An alert fires above 0.1.",
        "sci",
        last("trivet_trainer_first_mismatch_kl_nats", "KL"),
        thresholds=alarm((0.1, "red")),
        alerts=("mismatch-kl-high",),
    ),
    lines(
        "Difference of log-probabilities",
        "Absolute difference for a token before any update, in nats: mean and largest.",
        "sci",
        each("trivet_trainer_first_logprob_difference_nats", "statistic"),
        minimum=0,
    ),
    lines(
        "Routing agreement",
        "Share of the sampler's experts that the trainer's own routers would pick, measured before the captured choice "
        "takes its place. Nothing for a dense model. An alert fires below 80 %.",
        "percentunit",
        last("trivet_trainer_first_routing_agreement_ratio", "agreement"),
        maximum=1,
        thresholds=(Threshold(None, "red"), Threshold(0.8, "green")),
        alerts=("routing-agreement-low",),
    ),
    lines(
        "Candidate set",
        "Tokens that top-k and top-p left to choose from, mean over positions. A set that shrinks to 1 leaves "
        "nothing to explore.",
        "none",
        last("trivet_trainer_candidate_set_size_tokens", "tokens"),
        minimum=0,
    ),
    lines(
        "Staleness",
        "Versions between the weights that sampled and those that were trained, and the bound trainer.max_staleness.",
        "none",
        each("trivet_trainer_staleness_versions", "statistic"),
        last("trivet_trainer_staleness_limit_versions", "bound"),
        minimum=0,
        alerts=("samples-too-stale",),
    ),
)

IMPORTANCE: tuple[Panel, ...] = (
    lines(
        "Policy ratio",
        "Quantiles over tokens of the current over the old policy, before clipping, over all optimizer steps.",
        "none",
        each("trivet_trainer_policy_ratio", "statistic"),
    ),
    lines(
        "Importance ratio",
        "Quantiles over tokens of the old policy over the sampler, before its bounds. All 1 with "
        "algorithm.old_policy rollout.",
        "none",
        each("trivet_trainer_importance_ratio", "statistic"),
    ),
    lines(
        "Importance weight",
        "What the policy term is multiplied by, mean over tokens: bounds and calibration included.",
        "none",
        last("trivet_trainer_importance_weight", "weight"),
        last("trivet_trainer_importance_calibration", "calibration"),
        minimum=0,
    ),
)

POLICY: tuple[Panel, ...] = (
    lines(
        "Gradient norm",
        "Before clipping, mean and largest of the step's optimizer steps, and trainer.optimizer.max_grad_norm. An "
        "alert fires at ten times the median of three hours.",
        "none",
        last("trivet_trainer_grad_norm", "gradient norm"),
        last("trivet_trainer_grad_norm_max", "largest"),
        last("trivet_trainer_grad_norm_limit", "clipped to"),
        minimum=0,
        alerts=("gradient-explosion",),
    ),
    lines(
        "KL to the reference",
        "In nats a token, by rl_stability.unbiased_kl.estimator. An alert fires outside -0.05 to 0.5.",
        "none",
        last("trivet_trainer_kl_nats", "KL"),
        thresholds=(Threshold(None, "red"), Threshold(-0.05, "green"), Threshold(0.5, "red")),
        alerts=("kl-out-of-range",),
    ),
    lines(
        "Entropy",
        "Of the policy over the candidate set, in nats a token. Towards 0 the policy stops exploring.",
        "none",
        last("trivet_trainer_entropy_nats", "entropy"),
        minimum=0,
    ),
    lines(
        "Masked sequences",
        "Share of sequences that the sequence mask left out of the policy term. An alert fires above 30 %.",
        "percentunit",
        last("trivet_trainer_masked_fraction", "masked"),
        minimum=0,
        maximum=1,
        thresholds=alarm((0.3, "orange")),
        alerts=("mask-ratio-high",),
    ),
    lines(
        "Clipped tokens",
        "Share of tokens whose policy term is clipped.",
        "percentunit",
        last("trivet_trainer_clip_fraction", "clipped"),
        minimum=0,
    ),
    lines(
        "Skipped steps",
        "Optimizer steps of an hour that changed no weights, because a number was not finite. Any is an alert.",
        "none",
        Query(f"sum(increase(trivet_trainer_steps_skipped_total{{{RUN}}}[1h]))", "skipped"),
        minimum=0,
        alerts=("steps-not-finite",),
    ),
)

VERSIONS: tuple[Panel, ...] = (
    lines(
        "Rollouts behind the trainer",
        "Policy versions between the trainer's newest and the one that a rollout samples with.",
        "none",
        Query(
            f"scalar(max(trivet_trainer_step{{{RUN}}})) - max by (instance) (trivet_rollout_weights_version{{{RUN}}})",
            "{{instance}}",
        ),
        width=12,
        minimum=0,
        alerts=("rollout-behind",),
    ),
    lines(
        "Weights that did not load",
        "Failed loads an hour, by reason; the rollout keeps its old weights.",
        "none",
        Query(
            f"sum by (code) (increase(trivet_rollout_weights_load_failures_total{{{RUN}}}[1h]))"
            ' or label_replace(vector(0), "code", "none", "", "")',
            "{{code}}",
        ),
        width=12,
        minimum=0,
        alerts=("rollout-behind",),
    ),
)

BOARD = Board(
    uid="trivet-stability",
    title="Trivet / Stability",
    description="Are sampler and trainer one policy, and does the policy stay in bounds.",
    rows=(
        Row("Sampler against trainer", SAMPLER),
        Row("Importance", IMPORTANCE),
        Row("Policy", POLICY),
        Row("Versions", VERSIONS),
    ),
)
