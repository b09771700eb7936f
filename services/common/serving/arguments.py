"""The command line that services and the modules that write reports share."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from services.common.config import Config, ConfigError, all_overrides, load_config
from services.common.config.overrides import HELP, METAVAR
from services.common.errors import InvalidData, TrivetError, one_sentence
from services.common.exit_codes import CONFIGURATION, FAILED, FINISHED
from services.common.logs import ENDED, configure_logs, get_logger
from services.common.run_files.report import Report
from services.common.serving.signals import dump_stacks_on_signal


def parse_service_arguments(service: str, argv: list[str] | None = None) -> Config:
    """Reads --config, TRIVET_OVERRIDES and --set; leaves with status 2 and a sentence when they cannot be used."""
    dump_stacks_on_signal()
    configure_logs(service, "")
    parser = argparse.ArgumentParser(prog=f"python -m services.{service}")
    add_config(parser)
    add_overrides(parser)
    arguments = parser.parse_args(argv)
    try:
        return load_config(arguments.config, all_overrides(arguments.overrides))
    except ConfigError as error:
        sys.exit(report_end(CONFIGURATION, str(error)))


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's YAML")


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar=METAVAR, help=HELP)


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="where the report goes, as JSON")


def write_report(measure: Callable[[], Report | None], output: Path) -> int:
    """Of a module that writes one: the exit status. A rank that has none to write gives None."""
    try:
        report = measure()
        if report is not None:
            report.write(output)
    except (ConfigError, InvalidData, ValueError) as error:
        return report_end(CONFIGURATION, str(error))
    except (TrivetError, OSError) as error:
        return report_end(FAILED, one_sentence(error))
    return FINISHED


def check_module(service: str, check: Callable[[Config], Report]) -> NoReturn:
    """Of `python -m services.….check`: what a service finds wrong with a configuration, in a file."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{service}.check")
    add_config(parser)
    add_output(parser)
    arguments = parser.parse_args()
    check(load_config(arguments.config)).write(arguments.output)
    leave(FINISHED)


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
