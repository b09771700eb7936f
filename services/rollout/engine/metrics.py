"""Metrics of the rollout service."""

from prometheus_client import Counter, Gauge, Histogram

GROUPS = Counter("trivet_rollout_groups_total", "Groups sampled and handed on", ["purpose"])
SAMPLES = Counter("trivet_rollout_samples_total", "Samples drawn", ["purpose"])
TOKENS = Counter("trivet_rollout_tokens_total", "Completion tokens drawn", ["purpose"])
TRUNCATED = Counter("trivet_rollout_truncated_samples_total", "Samples that ended at max_tokens", ["purpose"])
FAILURES = Counter("trivet_rollout_failures_total", "Prompts that were not sampled, by reason", ["code"])
RUNNING_GROUPS = Gauge("trivet_rollout_running_groups", "Groups being sampled")
SAMPLING_SECONDS = Histogram(
    "trivet_rollout_sampling_seconds",
    "Seconds from a group's first request to its last finished sample",
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800),
)
TOKEN_SECONDS = Histogram(
    "trivet_rollout_token_seconds",
    "Seconds of a group's sampling for each token of its longest sample",
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5),
)
COMPLETION_TOKENS = Histogram(
    "trivet_rollout_completion_tokens",
    "Completion tokens of a sample",
    buckets=(1, 4, 16, 64, 256, 1024, 4096, 16384, 65536),
)
REPLAY_BYTES = Counter("trivet_rollout_replay_bytes_total", "Bytes of replay data before they leave the rollout")
WEIGHTS_VERSION = Gauge("trivet_rollout_weights_version", "Policy version that new tokens are drawn under")
WEIGHTS_LOAD_SECONDS = Histogram(
    "trivet_rollout_weights_load_seconds",
    "Seconds to verify and load a policy version",
    buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600),
)
WEIGHTS_LOAD_FAILURES = Counter(
    "trivet_rollout_weights_load_failures_total", "Policy versions that could not be loaded", ["code"]
)
ENGINE_RESTARTS = Counter("trivet_rollout_engine_restarts_total", "Times that the inference engine was started again")
