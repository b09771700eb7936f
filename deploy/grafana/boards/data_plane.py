"""What is under way between the services: queues, replay blobs, weights, checkpoints, Redis."""

from board import Board, Panel, Query, Row

from boards.parts import RUN, STEPWISE, counted, last, lines, mean, quantiles, rate

QUEUES: tuple[Panel, ...] = (
    lines(
        "Entries that wait",
        "Not yet taken by a consumer: prompts wait for a rollout, samples for a reward service, scored groups for the "
        "trainer. The queue that stays long names the bottleneck.",
        "none",
        Query(f'max by (stream) (trivet_stream_entries{{{RUN}, state="waiting"}})', "{{stream}}"),
        minimum=0,
        alerts=("backlog",),
    ),
    lines(
        "Oldest entry that waits",
        "Seconds, and the limit above which an alert names the service that is in the way: three times what the "
        "staleness bound makes an entry wait in a steady run, five minutes at least.",
        "s",
        Query(f"max by (stream) (trivet_stream_oldest_seconds{{{RUN}}})", "{{stream}}"),
        Query(f"max(run:trivet_stream_oldest_limit_seconds:max{{{RUN}}})", "limit"),
        minimum=0,
        alerts=("backlog",),
    ),
    lines(
        "Entries taken",
        "Read by a consumer and not yet acknowledged. Scored groups stay until a checkpoint holds them.",
        "none",
        Query(f'max by (stream) (trivet_stream_entries{{{RUN}, state="taken"}})', "{{stream}}"),
        minimum=0,
    ),
    lines(
        "Groups per second",
        "Issued, sampled, scored and trained on. In a steady run all four are the same.",
        "ops",
        rate("trivet_trainer_groups_issued_total", "issued", window=STEPWISE),
        rate("trivet_rollout_groups_total", "sampled", f'{RUN}, purpose="train"', window=STEPWISE),
        rate("trivet_reward_groups_total", "scored", window=STEPWISE),
        rate("trivet_trainer_groups_trained_total", "trained on", window=STEPWISE),
        minimum=0,
        alerts=("no-progress",),
    ),
    lines(
        "Groups under way",
        "Issued and neither trained on nor lost.",
        "none",
        last("trivet_trainer_groups_in_flight", "in flight"),
        minimum=0,
    ),
    lines(
        "Groups that took a detour",
        "An hour: without variance and replaced, arrived twice, or of an earlier run of the same name.",
        "none",
        Query(f"sum(increase(trivet_trainer_groups_filtered_total{{{RUN}}}[1h]))", "without variance"),
        Query(f"sum(increase(trivet_trainer_groups_duplicate_total{{{RUN}}}[1h]))", "duplicate"),
        Query(f"sum(increase(trivet_trainer_groups_stale_total{{{RUN}}}[1h]))", "of an earlier run"),
        minimum=0,
    ),
)

FAILURES: tuple[Panel, ...] = (
    lines(
        "Dead letters",
        "Of the run so far.",
        "none",
        last("trivet_run_dead_letters_total", "dead letters"),
        minimum=0,
        alerts=("dead-letters",),
    ),
    lines(
        "Dead letters by reason",
        "An hour.",
        "none",
        counted("trivet_dead_letters_total", "code"),
        minimum=0,
        alerts=("dead-letters",),
    ),
    lines(
        "Groups given up or issued again",
        "An hour, by reason.",
        "none",
        Query(
            f"sum by (code) (increase(trivet_trainer_groups_lost_total{{{RUN}}}[1h]))"
            ' or label_replace(vector(0), "code", "none", "", "")',
            "lost: {{code}}",
        ),
        Query(
            f"sum by (code) (increase(trivet_trainer_groups_reissued_total{{{RUN}}}[1h]))"
            ' or label_replace(vector(0), "code", "none", "", "")',
            "issued again: {{code}}",
        ),
        minimum=0,
        alerts=("dead-letters",),
    ),
    lines(
        "Entries claimed",
        "An hour, by stream: taken over from a consumer that stopped.",
        "none",
        counted("trivet_stream_claims_total", "stream"),
        minimum=0,
        alerts=("service-down",),
    ),
    lines(
        "Consumer groups made again",
        "An hour, by stream: Redis had lost them.",
        "none",
        counted("trivet_stream_rebuilds_total", "stream"),
        minimum=0,
        alerts=("redis-down",),
    ),
    lines(
        "Blobs that could not be used",
        "An hour, by reason. The group is sampled again.",
        "none",
        counted("trivet_blob_failures_total", "code"),
        minimum=0,
        alerts=("redis-memory-high",),
    ),
    lines(
        "Outages",
        "That began within an hour, by what could not serve. Services wait meanwhile.",
        "none",
        counted("trivet_outages_total", "code"),
        width=12,
        minimum=0,
        alerts=("outages",),
    ),
    lines(
        "Versions published again",
        "An hour: a rollout found the files on disk damaged or missing.",
        "none",
        Query(f"sum(increase(trivet_trainer_versions_repaired_total{{{RUN}}}[1h]))", "versions"),
        width=12,
        minimum=0,
        alerts=("rollout-behind",),
    ),
)

REPLAY: tuple[Panel, ...] = (
    lines(
        "Replay bytes per second",
        "Routing and candidate sets, put by rollouts and fetched by the trainer.",
        "Bps",
        rate("trivet_blob_bytes_total", "{{operation}}", by="operation", window=STEPWISE),
        minimum=0,
    ),
    lines(
        "Replay bytes per token",
        "Of what was sampled for training, over ten minutes.",
        "bytes",
        Query(
            f"sum(rate(trivet_rollout_replay_bytes_total{{{RUN}}}[{STEPWISE}]))"
            f' / sum(rate(trivet_rollout_tokens_total{{{RUN}, purpose="train"}}[{STEPWISE}]))',
            "bytes a token",
        ),
        minimum=0,
    ),
    lines(
        "Seconds to put or get a blob",
        "Median and 99 %.",
        "s",
        *quantiles("trivet_blob_seconds", by="operation", window=STEPWISE),
        minimum=0,
    ),
)

WEIGHTS: tuple[Panel, ...] = (
    lines(
        "Seconds to publish and load weights",
        "Mean over ten minutes: the trainer exports and announces, a rollout verifies and loads.",
        "s",
        mean("trivet_trainer_publish_seconds", "publish"),
        mean("trivet_rollout_weights_load_seconds", "load"),
        minimum=0,
        alerts=("rollout-behind",),
    ),
    lines(
        "Seconds to save a checkpoint",
        "Mean over an hour.",
        "s",
        mean("trivet_trainer_checkpoint_seconds", "save", window="1h"),
        minimum=0,
        alerts=("checkpoint-old", "checkpoints-damaged"),
    ),
    lines(
        "Size of weights and checkpoints",
        "The newest of each on disk.",
        "bytes",
        last("trivet_trainer_published_bytes", "policy version"),
        last("trivet_trainer_checkpoint_bytes", "checkpoint"),
        minimum=0,
    ),
    lines(
        "Rollouts that get weights from memory",
        "Where weights.transfer is nccl or ipc: how many the next policy version goes to past the disk.",
        "none",
        last("trivet_trainer_weight_transfer_rollouts", "in the group"),
        width=12,
        minimum=0,
    ),
    lines(
        "Weight transfers that failed",
        "In an hour, by reason; the version went to disk instead. An alert fires after three in half an hour.",
        "none",
        Query(
            f"sum by (code) (increase(trivet_trainer_weight_transfer_failures_total{{{RUN}}}[1h]))"
            ' or label_replace(vector(0), "code", "none", "", "")',
            "{{code}}",
        ),
        width=12,
        minimum=0,
        alerts=("weight-transfer-failing",),
    ),
)

REDIS: tuple[Panel, ...] = (
    lines(
        "Memory",
        "That Redis uses, and what it may use: maxmemory, or without it its machine's memory. An alert fires at 80 %.",
        "bytes",
        last("trivet_redis_memory_used_bytes", "used"),
        last("trivet_redis_memory_limit_bytes", "limit"),
        width=12,
        minimum=0,
        alerts=("redis-memory-high",),
    ),
    lines(
        "Reachable",
        "1 while Redis answers the trainer.",
        "none",
        last("trivet_redis_up", "reachable"),
        width=12,
        minimum=0,
        maximum=1,
        alerts=("redis-down",),
    ),
)

BOARD = Board(
    uid="trivet-data-plane",
    title="Trivet / Data plane",
    description="What is under way between the services: queues, replay blobs, weights, checkpoints, Redis.",
    rows=(
        Row("Queues", QUEUES),
        Row("Failures", FAILURES),
        Row("Replay blobs", REPLAY),
        Row("Weights and checkpoints", WEIGHTS),
        Row("Redis", REDIS),
    ),
)
