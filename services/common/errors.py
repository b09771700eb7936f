class TrivetError(Exception):
    """A failure with a name: `code` is for machines (a metric label, a dead letter's code), the message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class InvalidData(TrivetError):
    """A message or blob that breaks its contract. Trying again does not help."""


class GaveUp(TrivetError):
    """The run cannot be saved by a restart: it ends, and stays ended until somebody has looked at it."""


class Unavailable(TrivetError):
    """Something outside did not answer in time. Trying again may help."""
