import errno
from collections.abc import Iterator
from contextlib import contextmanager


class TrivetError(Exception):
    """A failure with a name: `code` is for machines (a metric label, a dead letter's code), the message for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ConfigError(Exception):
    """The configuration cannot be used; the message names each field, its value and what was expected."""


class InvalidData(TrivetError):
    """A message or blob that breaks its contract. Trying again does not help."""


class GaveUp(TrivetError):
    """The run cannot be saved by a restart: it ends, and stays ended until somebody has looked at it."""


class Unavailable(TrivetError):
    """Something outside did not answer in time. Trying again may help."""


class Outage(Unavailable):
    """What everybody needs cannot serve at present: Redis is full, a store is. It is waited for, and costs nothing."""


class Unreachable(Unavailable):
    """A server does not answer at all, which is an Outage to those who have nothing to do without it."""


@contextmanager
def entrys_fault() -> Iterator[None]:
    """Around code that looks at an entry and at nothing else: what that raises is InvalidData ("entry_unusable").

    Too little memory is left out: an entry that takes all of it is given up by its deliveries.
    """
    try:
        yield
    except (TrivetError, MemoryError):
        raise
    except Exception as error:
        raise InvalidData("entry_unusable", f"entry cannot be used ({type(error).__name__}: {error})") from error


def one_sentence(error: BaseException) -> str:
    """What a failure is to those who only want to know what to do: a full disk by its path, no traceback."""
    if isinstance(error, TrivetError) or (type(error) is OSError and error.errno is None):
        return str(error)
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return f"the disk is full: {error.filename or 'a file'} cannot be written ({error.strerror})"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
