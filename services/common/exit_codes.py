"""Every exit status of a service or a command. docs/troubleshooting.md says what to do about each."""

# The run is finished; a service has stopped when asked to; a command has done what it was asked for.
FINISHED = 0
# A restart may help. Of audit and rerun: measured, and not within the thresholds or not equal.
FAILED = 1
# Configuration, data or model cannot be used: never restarted. Services end with it only while they start.
CONFIGURATION = 2
# Of audit, rerun and compare: nothing was measured, whatever the reason.
NO_VERDICT = 2
# A trainer was asked to stop; there is a checkpoint to resume from.
STOPPED = 3
# The run diverged, or lost too many groups: never restarted.
GAVE_UP = 4
# A command was interrupted (Ctrl-C or SIGTERM); after `trivet up` there is a checkpoint to resume from.
INTERRUPTED = 130

NEVER_RESTARTED = frozenset({CONFIGURATION, GAVE_UP})
