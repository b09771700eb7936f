import logging
import sys

import structlog

from services.common.secrets import without_password
from services.common.strict_json import strict


def configure_logs(service: str, run: str, level: int = logging.INFO) -> None:
    """JSON lines on standard error; every line carries the service and the run, and what is bound to the context."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _hide_passwords,
            _strict,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service, run=run)


def _hide_passwords(_: object, __: str, entry: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """A library's error, or a traceback, may hold an address with its password."""
    return {name: without_password(value) if isinstance(value, str) else value for name, value in entry.items()}


def _strict(_: object, __: str, entry: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {name: strict(value) for name, value in entry.items()}


def get_logger(name: str) -> structlog.typing.FilteringBoundLogger:
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(module=name)
    return logger
