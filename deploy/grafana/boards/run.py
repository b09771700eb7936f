"""Does the run learn, how fast is it, and what is it made of."""

from board import Board, Panel, Query, Row, Threshold

from boards.parts import RUN, STEPWISE, each, heatmap, last, lines, mean, number, rate

STEP_SECONDS = (
    f"sum(increase(trivet_trainer_step_seconds_sum{{{RUN}}}[1h]))"
    f" / sum(increase(trivet_trainer_step_seconds_count{{{RUN}}}[1h]))"
)
STEPS_LEFT = f"max(trivet_trainer_steps_planned{{{RUN}}}) - max(trivet_trainer_step{{{RUN}}})"

NOW: tuple[Panel, ...] = (
    number("Step", "Training steps finished.", "none", f"max(trivet_trainer_step{{{RUN}}})", alerts=("no-progress",)),
    number(
        "Steps planned", "trainer.steps of the configuration.", "none", f"max(trivet_trainer_steps_planned{{{RUN}}})"
    ),
    number("Time left", "Steps left times the mean step of an hour.", "s", f"({STEPS_LEFT}) * ({STEP_SECONDS})"),
    number(
        "Step time", "Mean seconds of a step in the last hour, without evaluations and checkpoints.", "s", STEP_SECONDS
    ),
    number(
        "Reward",
        "Mean reward of the last step's samples.",
        "none",
        f'max(trivet_trainer_reward{{{RUN}, statistic="mean"}})',
        decimals=3,
        alerts=("reward-collapse",),
    ),
    number(
        "Held-out accuracy",
        "Share of held-out prompts answered correctly, decoding greedily.",
        "percentunit",
        f'max(trivet_trainer_evaluation_accuracy_ratio{{{RUN}, decoding="greedy"}})',
        decimals=1,
    ),
    number(
        "Alerts firing",
        "Alerts of this run that fire now.",
        "none",
        f'count(ALERTS{{alertname=~"Trivet.*", alertstate="firing", {RUN}}}) or vector(0)',
        thresholds=(Threshold(None, "green"), Threshold(1, "red")),
    ),
    number(
        "Checkpoint age",
        "Seconds since the newest checkpoint was saved. Nothing to show before the first.",
        "s",
        f"time() - (max(trivet_trainer_checkpoint_timestamp_seconds{{{RUN}}}) > 0)",
        thresholds=(Threshold(None, "green"), Threshold(7200, "orange")),
        alerts=("checkpoint-old",),
    ),
)

LEARNING: tuple[Panel, ...] = (
    lines(
        "Reward",
        "Mean of the last step's samples, and their standard deviation: without one there is nothing to learn from.",
        "none",
        each("trivet_trainer_reward", "statistic"),
        alerts=("reward-collapse",),
    ),
    lines(
        "Held-out accuracy",
        "Share of held-out prompts answered correctly, greedily and by sampling.",
        "percentunit",
        each("trivet_trainer_evaluation_accuracy_ratio", "decoding"),
        minimum=0,
        maximum=1,
    ),
    heatmap(
        "Reward distribution",
        "Rewards of single training samples in ten minutes.",
        "trivet_reward_sample_reward",
        f'{RUN}, purpose="train"',
    ),
    lines(
        "Completion length",
        "Tokens of a completion: mean of a step's samples, and on held-out prompts.",
        "none",
        last("trivet_trainer_length_mean_tokens", "training"),
        Query(f"max by (decoding) (trivet_trainer_evaluation_length_tokens{{{RUN}}})", "held out, {{decoding}}"),
        minimum=0,
        alerts=("completion-length-collapse",),
    ),
    lines(
        "Samples without use",
        "Share of samples cut off at sampling.max_tokens, and share of groups whose rewards are all the same.",
        "percentunit",
        last("trivet_trainer_truncated_fraction", "cut off"),
        last("trivet_trainer_groups_without_variance_ratio", "groups without variance"),
        minimum=0,
        maximum=1,
        alerts=("nothing-to-learn",),
    ),
    heatmap("Advantages", "Advantages of single samples in ten minutes.", "trivet_trainer_sample_advantage"),
)

OPTIMISATION: tuple[Panel, ...] = (
    lines("Loss", "The loss of a step, all terms together.", "none", last("trivet_trainer_loss", "loss")),
    lines(
        "Terms of the loss",
        "Its summands, coefficients included.",
        "none",
        *(last(f"trivet_trainer_{term}_loss", term) for term in ("policy", "kl", "value", "entropy")),
    ),
    lines(
        "Learning rate", "Of the last step.", "sci", last("trivet_trainer_learning_rate", "learning rate"), minimum=0
    ),
)

TIME: tuple[Panel, ...] = (
    lines(
        "Seconds in each phase",
        "Mean over ten minutes. A trainer that mostly waits needs more rollouts; one that mostly trains, more ranks.",
        "s",
        mean("trivet_trainer_phase_seconds", "{{phase}}", by="phase"),
        minimum=0,
    ),
    lines(
        "Tokens per second",
        "Completion tokens sampled, scored and trained on. Evaluations count for the first two.",
        "short",
        rate("trivet_rollout_tokens_total", "rollout"),
        rate("trivet_reward_tokens_total", "reward"),
        rate("trivet_trainer_tokens_total", "trainer", window=STEPWISE),
        minimum=0,
    ),
    lines(
        "Steps",
        "Training steps finished, and the step of the newest checkpoint.",
        "none",
        last("trivet_trainer_step", "finished"),
        last("trivet_trainer_checkpoint_step", "in a checkpoint"),
        minimum=0,
        alerts=("no-progress", "checkpoint-old"),
    ),
)

VALUE_HEAD: tuple[Panel, ...] = (
    lines(
        "Value and return",
        "The value head's estimate and what it is taught, mean over tokens.",
        "none",
        last("trivet_trainer_value", "value"),
        last("trivet_trainer_return", "return"),
    ),
    lines(
        "Clipped values",
        "Share of tokens whose value moved further than value_clip allows.",
        "percentunit",
        last("trivet_trainer_value_clip_fraction", "clipped"),
        minimum=0,
        maximum=1,
    ),
)

PREFERENCES: tuple[Panel, ...] = (
    lines(
        "Preference accuracy",
        "Share of pairs whose chosen answer has the higher implicit reward: of the step, and held out.",
        "percentunit",
        last("trivet_trainer_preference_accuracy_ratio", "training"),
        last("trivet_trainer_evaluation_preference_accuracy_ratio", "held out"),
        minimum=0,
        maximum=1,
    ),
    lines(
        "Margin",
        "Implicit reward of the chosen less that of the rejected answer.",
        "none",
        each("trivet_trainer_preference_margin", "statistic"),
    ),
    lines(
        "Implicit rewards",
        "Beta times the log-ratio to the reference. Both may fall; the chosen should fall less.",
        "none",
        *(last(f"trivet_trainer_{answer}_reward", answer) for answer in ("chosen", "rejected")),
    ),
)

BOARD = Board(
    uid="trivet-run",
    title="Trivet / Run",
    description="Does the run learn, and how fast is it.",
    rows=(
        Row("Now", NOW),
        Row("Learning", LEARNING),
        Row("Optimisation", OPTIMISATION),
        Row("Time", TIME),
        Row("Value head (ppo)", VALUE_HEAD, collapsed=True),
        Row("Preferences (dpo)", PREFERENCES, collapsed=True),
    ),
)
