"""Each service by itself: is it there, how busy is it, what fails."""

from board import Board, Panel, Query, Row, Threshold

from boards.parts import AT, FLOW, STEPWISE, counted, heatmap, lines, mean, quantiles, rate

PROCESSES: tuple[Panel, ...] = (
    lines(
        "Services that answer",
        "Instances by service; a number that falls means a missing service.",
        "none",
        Query(f"count by (service) (trivet_build_info{{{AT}}})", "{{service}}"),
        minimum=0,
        alerts=("service-down",),
    ),
    lines(
        "CPU",
        "Cores that the process uses, its children not counted.",
        "none",
        Query(f"sum by (instance) (rate(process_cpu_seconds_total{{{AT}}}[{FLOW}]))", "{{instance}}"),
        minimum=0,
    ),
    lines(
        "Memory",
        "Resident memory of the process, its children not counted.",
        "bytes",
        Query(f"max by (instance) (process_resident_memory_bytes{{{AT}}})", "{{instance}}"),
        minimum=0,
    ),
)

ROLLOUT: tuple[Panel, ...] = (
    lines(
        "Tokens per second",
        "Completion tokens sampled, by rollout.",
        "short",
        rate("trivet_rollout_tokens_total", "{{instance}}", AT, by="instance"),
        minimum=0,
        alerts=("backlog",),
    ),
    lines(
        "Seconds per token",
        "A group's sampling for each token of its longest sample: median and 99 %.",
        "s",
        *quantiles("trivet_rollout_token_seconds", AT, window=STEPWISE),
        minimum=0,
    ),
    lines(
        "Seconds per group",
        "From a group's first request to its last finished sample: median and 99 %.",
        "s",
        *quantiles("trivet_rollout_sampling_seconds", AT, window=STEPWISE),
        minimum=0,
    ),
    lines(
        "Groups being sampled",
        "At most rollout.concurrent_groups.",
        "none",
        Query(f"max by (instance) (trivet_rollout_running_groups{{{AT}}})", "{{instance}}"),
        minimum=0,
    ),
    heatmap("Completion length", "Tokens of completions in ten minutes.", "trivet_rollout_completion_tokens", AT),
    lines(
        "Weights",
        "Policy version that new tokens are drawn under.",
        "none",
        Query(f"max by (instance) (trivet_rollout_weights_version{{{AT}}})", "{{instance}}"),
        alerts=("rollout-behind",),
    ),
    lines(
        "Cut-off samples",
        "Share of samples that ended at max_tokens, by purpose.",
        "percentunit",
        Query(
            f"sum by (purpose) (rate(trivet_rollout_truncated_samples_total{{{AT}}}[{STEPWISE}]))"
            f" / sum by (purpose) (rate(trivet_rollout_samples_total{{{AT}}}[{STEPWISE}]))",
            "{{purpose}}",
        ),
        minimum=0,
        maximum=1,
        alerts=("completion-length-collapse",),
    ),
    lines(
        "Prompts not sampled",
        "An hour, by reason.",
        "none",
        counted("trivet_rollout_failures_total", "code", AT),
        minimum=0,
        alerts=("dead-letters",),
    ),
    lines(
        "Engine restarts",
        "An hour.",
        "none",
        Query(f"sum by (instance) (increase(trivet_rollout_engine_restarts_total{{{AT}}}[1h]))", "{{instance}}"),
        minimum=0,
        alerts=("rollout-behind",),
    ),
)

REWARD: tuple[Panel, ...] = (
    lines(
        "Samples per second",
        "Samples of scored groups, by reward service.",
        "ops",
        rate("trivet_reward_samples_total", "{{instance}}", AT, by="instance"),
        minimum=0,
        alerts=("backlog",),
    ),
    lines(
        "Seconds per score",
        "From hand-over to a scorer until its value, waiting included: median and 99 %.",
        "s",
        *quantiles("trivet_reward_scoring_seconds", AT, by="scorer", window=STEPWISE),
        minimum=0,
    ),
    lines(
        "Mean reward",
        "Of an instance's last 1,024 samples, by purpose.",
        "none",
        Query(f"avg by (purpose) (trivet_reward_mean{{{AT}}})", "{{purpose}}"),
        alerts=("reward-collapse",),
    ),
    lines(
        "Groups being scored",
        "At most reward.concurrent_groups.",
        "none",
        Query(f"max by (instance) (trivet_reward_running_groups{{{AT}}})", "{{instance}}"),
        minimum=0,
    ),
    lines(
        "Cache",
        "Scores taken from the cache, a second, and scores in it.",
        "short",
        rate("trivet_reward_cache_hits_total", "hits", AT),
        Query(f"sum(trivet_reward_cache_entries{{{AT}}})", "entries"),
        minimum=0,
    ),
    lines(
        "Failures",
        "An hour: groups without a reward and further tries, by reason, and scorer pools replaced.",
        "none",
        Query(
            f"sum by (code) (increase(trivet_reward_failures_total{{{AT}}}[1h]))"
            ' or label_replace(vector(0), "code", "none", "", "")',
            "failed: {{code}}",
        ),
        Query(
            f"sum by (code) (increase(trivet_reward_retries_total{{{AT}}}[1h]))"
            ' or label_replace(vector(0), "code", "none", "", "")',
            "tried again: {{code}}",
        ),
        Query(f"sum(increase(trivet_reward_pool_restarts_total{{{AT}}}[1h]))", "pools replaced"),
        minimum=0,
        alerts=("dead-letters",),
    ),
)

TRAINER: tuple[Panel, ...] = (
    lines(
        "Tokens per second",
        "Completion tokens trained on, over ten minutes.",
        "short",
        rate("trivet_trainer_tokens_total", "trainer", AT, window=STEPWISE),
        minimum=0,
        alerts=("no-progress",),
    ),
    lines(
        "Seconds per step",
        "Mean over ten minutes, without evaluations and checkpoints.",
        "s",
        mean("trivet_trainer_step_seconds", "step", AT),
        minimum=0,
    ),
    lines(
        "Share of time in each phase",
        "Of ten minutes.",
        "percentunit",
        Query(f"sum by (phase) (rate(trivet_trainer_phase_seconds_sum{{{AT}}}[{STEPWISE}]))", "{{phase}}"),
        minimum=0,
        stacked=True,
    ),
)

GPU: tuple[Panel, ...] = (
    lines(
        "GPU memory",
        "Share in use, by all processes on it.",
        "percentunit",
        Query(
            f"max by (instance, gpu) (trivet_gpu_memory_used_bytes{{{AT}}})"
            f" / max by (instance, gpu) (trivet_gpu_memory_total_bytes{{{AT}}})",
            "{{instance}} GPU {{gpu}}",
        ),
        width=12,
        minimum=0,
        maximum=1,
        thresholds=(Threshold(None, "green"), Threshold(0.95, "orange")),
    ),
    lines(
        "GPU use",
        "Share of time in which a GPU computed.",
        "percentunit",
        Query(f"max by (instance, gpu) (trivet_gpu_utilization_ratio{{{AT}}})", "{{instance}} GPU {{gpu}}"),
        width=12,
        minimum=0,
        maximum=1,
    ),
)

BOARD = Board(
    uid="trivet-services",
    title="Trivet / Services",
    description="Each service by itself: is it there, how busy is it, what fails.",
    rows=(
        Row("Processes", PROCESSES),
        Row("Rollout", ROLLOUT),
        Row("Reward", REWARD),
        Row("Trainer", TRAINER),
        Row("GPU", GPU),
    ),
    by_instance=True,
)
