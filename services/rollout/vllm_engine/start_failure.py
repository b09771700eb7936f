"""Why vLLM did not start. Only the process in which it happened knows: the one that started it hears that it ended."""

import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from services.common.config import ConfigError
from services.common.errors import TrivetError, Unavailable, one_sentence

# Names a file to every process of vLLM, however it is started.
_VARIABLE = "_TRIVET_VLLM_FAILURE"
_KILLED = re.compile(r": -9\b")


class _FirstFailure(logging.Handler):
    """Writes the first exception that vLLM logs to the file: what fails after it fails because of it."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            # Another has written it, or vLLM runs and nobody waits for it any more.
            with suppress(OSError, KeyError), Path(os.environ[_VARIABLE]).open("x", encoding="utf-8") as file:
                file.write(one_sentence(record.exc_info[1]))


def keep_first_failure() -> None:
    """From now on what this process of vLLM logs is seen by `naming_failure` in the one that started it."""
    logger = logging.getLogger("vllm")
    if not any(isinstance(handler, _FirstFailure) for handler in logger.handlers):
        logger.addHandler(_FirstFailure(logging.ERROR))


@contextmanager
def naming_failure() -> Iterator[None]:
    """Around a start of vLLM: raises Unavailable("engine_start") that begins with vLLM's own reason, in one line."""
    with tempfile.TemporaryDirectory(prefix="trivet-vllm-") as directory:
        file = Path(directory) / "reason"
        os.environ[_VARIABLE] = str(file)
        try:
            yield
        except (TrivetError, ConfigError):
            raise
        except Exception as error:  # what vLLM raises for a failed start has no class in common
            said = one_sentence(error)
            reason = file.read_text(encoding="utf-8") if file.exists() else said
            if _KILLED.search(said):
                reason += ": memory may have run out"
            raise Unavailable("engine_start", f"{reason} (vLLM did not start)") from error
        finally:
            del os.environ[_VARIABLE]
