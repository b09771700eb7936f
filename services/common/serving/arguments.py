"""The command line that the three services share."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from services.common.config import Config, ConfigError, load_config
from services.common.errors import InvalidData
from services.common.exit_codes import CONFIGURATION
from services.common.logs import ENDED, configure_logs, get_logger
from services.common.serving.signals import dump_stacks_on_signal

# A JSON list of overrides, applied before those of the command line: unlike arguments, others cannot read it.
OVERRIDES_VARIABLE = "TRIVET_OVERRIDES"
# The same for `trivet compare --set-for`.
OVERRIDES_FOR_VARIABLE = "TRIVET_OVERRIDES_FOR"


def parse_service_arguments(service: str, argv: list[str] | None = None) -> Config:
    """Reads --config, TRIVET_OVERRIDES and --set; leaves with status 2 and a sentence when they cannot be used."""
    dump_stacks_on_signal()
    configure_logs(service, "")
    parser = argparse.ArgumentParser(prog=f"python -m services.{service}")
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's YAML")
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE", help="override; repeatable"
    )
    arguments = parser.parse_args(argv)
    try:
        return load_config(arguments.config, [*inherited_overrides(), *arguments.overrides])
    except ConfigError as error:
        sys.exit(report_end(CONFIGURATION, str(error)))


def inherited_overrides(variable: str = OVERRIDES_VARIABLE) -> list[str]:
    """Those that came by the environment."""
    overrides: list[str] = json.loads(os.environ.get(variable, "[]"))
    return overrides


def overrides_environment(overrides: Sequence[str], variable: str = OVERRIDES_VARIABLE) -> dict[str, str]:
    """For a process to start: secrets among them must not show in the list of processes."""
    return {variable: json.dumps(list(overrides))}


def report_end(status: int, reason: str, **details: object) -> int:
    """Logs in one sentence why a service fails; returns `status`."""
    get_logger(__name__).error(ENDED, exit_code=status, reason=reason, **details)
    return status


@contextmanager
def starting() -> Iterator[None]:
    """What cannot be used while a service starts is its configuration, data or model: raises ConfigError for it."""
    try:
        yield
    except (InvalidData, ValueError) as error:
        raise ConfigError(str(error)) from error


def leave(code: int) -> NoReturn:
    """At once: threads of libraries must not keep a finished process alive."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
