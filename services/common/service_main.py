"""The command line that the three services share."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from services.common.config import Config, ConfigError, load_config
from services.common.errors import InvalidData
from services.common.exit_codes import CONFIGURATION
from services.common.signals import tell_stacks


def parse_service_arguments(service: str, argv: list[str] | None = None) -> Config:
    """Reads --config and --set; leaves with status 2 and a sentence when they cannot be used."""
    tell_stacks()
    parser = argparse.ArgumentParser(prog=f"python -m services.{service}")
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's YAML")
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE", help="override; repeatable"
    )
    arguments = parser.parse_args(argv)
    try:
        return load_config(arguments.config, arguments.overrides)
    except ConfigError as error:
        sys.exit(_usage(error))


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


def _usage(error: ConfigError) -> int:
    print(error, file=sys.stderr)  # noqa: T201
    return CONFIGURATION
