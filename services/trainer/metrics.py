from prometheus_client import Counter, Gauge, Histogram

STEP = Gauge("trivet_trainer_step", "Training steps finished")
STEP_METRIC = Gauge("trivet_trainer_step_metric", "A number about the last step", ["name"])
EVALUATION_METRIC = Gauge("trivet_trainer_evaluation_metric", "A number about the last evaluation", ["name"])
PHASE_SECONDS = Histogram(
    "trivet_trainer_phase_seconds",
    "Seconds of each phase of a step",
    ["phase"],
    buckets=(0.01, 0.1, 0.5, 1, 5, 30, 120, 600),
)
GROUPS_ISSUED = Counter("trivet_trainer_groups_issued_total", "Groups issued for training")
GROUPS_TRAINED = Counter("trivet_trainer_groups_trained_total", "Groups trained on")
GROUPS_REISSUED = Counter("trivet_trainer_groups_reissued_total", "Groups issued again, by reason", ["code"])
GROUPS_LOST = Counter("trivet_trainer_groups_lost_total", "Groups given up and replaced, by reason", ["code"])
GROUPS_DUPLICATE = Counter("trivet_trainer_groups_duplicate_total", "Groups that arrived again and were not counted")
GROUPS_FILTERED = Counter("trivet_trainer_groups_filtered_total", "Groups without variance, replaced")
GROUPS_STALE = Counter("trivet_trainer_groups_stale_total", "Groups of an earlier run of the same name, dropped")
GROUPS_IN_FLIGHT = Gauge("trivet_trainer_groups_in_flight", "Groups issued and neither trained nor lost")
STEPS_SKIPPED = Counter(
    "trivet_trainer_steps_skipped_total", "Steps without an update because the gradient was not finite"
)
PUBLISH_SECONDS = Histogram("trivet_trainer_publish_seconds", "Seconds to export and announce a policy version")
CHECKPOINT_SECONDS = Histogram("trivet_trainer_checkpoint_seconds", "Seconds to save a checkpoint")
CHECKPOINT_STEP = Gauge("trivet_trainer_checkpoint_step", "Step of the newest checkpoint")
CHECKPOINT_TIME = Gauge("trivet_trainer_checkpoint_timestamp_seconds", "When the newest checkpoint was saved")
