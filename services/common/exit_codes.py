"""What a service's exit status says to whoever started it."""

FINISHED = 0
# A restart may help.
FAILED = 1
# Only while starting: the configuration, the data or the model cannot be used.
CONFIGURATION = 2
# Asked to stop; there is a checkpoint to resume from.
STOPPED = 3
# The run cannot be saved by a restart: it diverged, or lost too many groups.
GAVE_UP = 4

NEVER_RESTARTED = frozenset({CONFIGURATION, GAVE_UP})
