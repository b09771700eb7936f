import logging
import os
import sys
import threading
from types import TracebackType
from typing import TextIO

import structlog

from services.common.errors import one_sentence
from services.common.exit_codes import FAILED
from services.common.secrets import hidden
from services.common.strict_json import strict

# The event of a service's last line when it fails; whoever started it shows the reason.
ENDED = "ended"


def configure_logs(service: str, run: str, level: int = logging.INFO) -> None:
    """JSON lines on standard error; every line carries the service and the run, and what is bound to the context.

    What libraries log comes there, too, from WARNING on, as does what nobody catches. No line holds a secret that can
    be recognized by its form.
    """
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _hide_secrets,
            _strict,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(_Lines(sys.stderr)),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service, run=run)
    if not any(isinstance(handler, _Libraries) for handler in logging.root.handlers):
        logging.root.addHandler(_Libraries(logging.WARNING))
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(module=name)
    return logger


def _hide_secrets(_: object, __: str, entry: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """A library's error, or a traceback with its notes and causes, may hold an address with its password."""
    shown: structlog.typing.EventDict = hidden(entry)
    return shown


def _strict(_: object, __: str, entry: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {name: strict(value) for name, value in entry.items()}


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    get_logger(__name__).error(ENDED, exit_code=FAILED, reason=one_sentence(error), exc_info=(kind, error, trace))


def _uncaught_in_thread(ended: threading.ExceptHookArgs) -> None:
    name = ended.thread.name if ended.thread is not None else "unknown"
    get_logger(__name__).error("a thread ended", thread=name, exc_info=ended.exc_value)


class _Libraries(logging.Handler):
    """Those that use Python's logging and have no handler of their own: redis, botocore, uvicorn, grpc, asyncio."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            get_logger(record.name).log(record.levelno, record.getMessage(), exc_info=record.exc_info)
        except Exception:  # noqa: BLE001 - as the standard handlers do: a line that cannot be made ends nothing
            self.handleError(record)


class _Lines:
    """Whole lines. A full disk takes a part of one, or nothing: that ends nobody, and the next line is a new one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._torn, self._lock = stream, False, threading.Lock()

    def write(self, line: str) -> None:
        with self._lock:
            data = ("\n" * self._torn + line).encode()
            try:
                written = os.write(self._stream.fileno(), data)
            except OSError:
                return
            self._torn = written < len(data)

    def flush(self) -> None:
        self._stream.flush()
