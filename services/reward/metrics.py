"""Metrics of the reward service."""

from prometheus_client import Counter, Gauge, Histogram

GROUPS = Counter("trivet_reward_groups_total", "Groups scored")
SAMPLES = Counter("trivet_reward_samples_total", "Samples of scored groups")
TOKENS = Counter("trivet_reward_tokens_total", "Completion tokens of scored groups")
FAILURES = Counter("trivet_reward_failures_total", "Groups that got no reward, by reason", ["code"])
RETRIES = Counter("trivet_reward_retries_total", "Further tries of a scorer that failed", ["scorer", "code"])
SCORING_SECONDS = Histogram(
    "trivet_reward_scoring_seconds",
    "Seconds from a sample's hand-over to a scorer until its value, waiting included",
    ["scorer"],
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
)
CACHE_HITS = Counter("trivet_reward_cache_hits_total", "Scores taken from the cache")
CACHE_ENTRIES = Gauge("trivet_reward_cache_entries", "Scores in the cache")
POOL_RESTARTS = Counter("trivet_reward_pool_restarts_total", "Scorer pools replaced because they broke")
RUNNING_GROUPS = Gauge("trivet_reward_running_groups", "Groups being scored")
MEAN = Gauge("trivet_reward_mean", "Mean reward of the last 1,024 samples", ["purpose"])
# Fine from 0 to 1, where most rewards lie, and coarse around it.
SAMPLE_REWARD = Histogram(
    "trivet_reward_sample_reward",
    "Rewards of single samples",
    ["purpose"],
    buckets=(-10, -5, -2, -1, -0.5, -0.25, 0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 2, 5, 10),
)
