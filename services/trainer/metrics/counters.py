"""Metrics of the trainer, other than those of a step (step_gauges.py)."""

from prometheus_client import Counter, Gauge, Histogram

LONG_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1200, 3600)

STEP = Gauge("trivet_trainer_step", "Training steps finished, which is also the newest policy version")
STEP_TIME = Gauge(
    "trivet_trainer_step_timestamp_seconds", "When the last step ended, and before the first when the trainer started"
)
STEP_SECONDS = Histogram(
    "trivet_trainer_step_seconds",
    "Seconds of a step: waiting for samples, training, and publishing",
    buckets=LONG_SECONDS,
)
PHASE_SECONDS = Histogram(
    "trivet_trainer_phase_seconds", "Seconds of each phase of a step", ["phase"], buckets=LONG_SECONDS
)
TOKENS = Counter("trivet_trainer_tokens_total", "Completion tokens trained on")
SAMPLE_ADVANTAGE = Histogram(
    "trivet_trainer_sample_advantage",
    "Advantages of single samples, as a step starts",
    buckets=(-5, -3, -2, -1.5, -1, -0.75, -0.5, -0.25, -0.1, 0, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5),
)
STEPS_SKIPPED = Counter(
    "trivet_trainer_steps_skipped_total",
    "Optimizer steps that changed nothing because a number was not finite: of the forward, the loss or the gradient",
    ["code"],
)
for _code in ("forward", "loss", "gradient"):
    # From 0 on, so that a rate sees the first one.
    STEPS_SKIPPED.labels(_code)
PAUSED = Gauge("trivet_trainer_paused", "1 while somebody has paused the training")

GROUPS_ISSUED = Counter("trivet_trainer_groups_issued_total", "Groups issued for training")
GROUPS_TRAINED = Counter("trivet_trainer_groups_trained_total", "Groups trained on")
GROUPS_REISSUED = Counter("trivet_trainer_groups_reissued_total", "Groups issued again, by reason", ["code"])
GROUPS_LOST = Counter("trivet_trainer_groups_lost_total", "Groups given up and replaced, by reason", ["code"])
GROUPS_DUPLICATE = Counter("trivet_trainer_groups_duplicate_total", "Groups that arrived again and were not counted")
GROUPS_FILTERED = Counter("trivet_trainer_groups_filtered_total", "Groups without variance, replaced")
GROUPS_STALE = Counter("trivet_trainer_groups_stale_total", "Groups of an earlier run of the same name, dropped")
GROUPS_IN_FLIGHT = Gauge("trivet_trainer_groups_in_flight", "Groups issued and neither trained nor lost")

STEPS_RECORDED = Counter("trivet_trainer_steps_recorded_total", "Steps written down so that they can be run again")
PUBLISH_SECONDS = Histogram(
    "trivet_trainer_publish_seconds", "Seconds to export and announce a policy version", buckets=LONG_SECONDS
)
VERSIONS_REPAIRED = Counter(
    "trivet_trainer_versions_repaired_total", "Policy versions published again because a rollout found them damaged"
)
PUBLISHED_BYTES = Gauge("trivet_trainer_published_bytes", "Size of the newest policy version")
TRANSFER_SECONDS = Histogram(
    "trivet_trainer_weight_transfer_seconds",
    "Seconds to hand a policy version over from memory to memory, until every rollout of the group draws under it",
    buckets=LONG_SECONDS,
)
TRANSFER_BYTES = Counter("trivet_trainer_weight_transfer_bytes_total", "Bytes of policy versions handed over in memory")
TRANSFER_FAILURES = Counter(
    "trivet_trainer_weight_transfer_failures_total",
    "Rollouts or groups that a version did not reach from memory, by reason; it then went to disk",
    ["code"],
)
TRANSFER_MEMBERS = Gauge("trivet_trainer_weight_transfer_rollouts", "Rollouts that the next policy version goes to")
CHECKPOINT_SECONDS = Histogram(
    "trivet_trainer_checkpoint_seconds", "Seconds to save a checkpoint", buckets=LONG_SECONDS
)
CHECKPOINT_STEP = Gauge("trivet_trainer_checkpoint_step", "Step of the newest checkpoint")
CHECKPOINT_TIME = Gauge(
    "trivet_trainer_checkpoint_timestamp_seconds", "When the newest checkpoint was saved; 0 while there is none"
)
BEST_CHECKPOINT_STEP = Gauge(
    "trivet_trainer_best_checkpoint_step", "Step of the checkpoint that is kept for its held-out score; 0 for none"
)
CHECKPOINTS_DAMAGED = Counter(
    "trivet_trainer_checkpoints_damaged_total", "Checkpoints that were found damaged at the start and put aside"
)
CHECKPOINT_BYTES = Gauge("trivet_trainer_checkpoint_bytes", "Size of the newest checkpoint")

# What the configuration says, for alerts and dashboards to compare with.
STEPS_PLANNED = Gauge("trivet_trainer_steps_planned", "trainer.steps")
GRAD_NORM_LIMIT = Gauge("trivet_trainer_grad_norm_limit", "trainer.optimizer.max_grad_norm")
STALENESS_LIMIT = Gauge("trivet_trainer_staleness_limit_versions", "trainer.max_staleness")
CHECKPOINT_INTERVAL = Gauge("trivet_trainer_checkpoint_interval_steps", "trainer.checkpoint_every")
REWARD_RANGE = Gauge("trivet_trainer_reward_range", "Lowest and highest reward that can be given", ["bound"])
