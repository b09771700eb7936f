"""Makes what the configuration's `prepare` names, unless it is there: `python prepare.py --config FILE`."""

import sys

import typer
from rich.console import Console

from services.cli.shared.start import prepare
from services.common.serving.arguments import parse_service_arguments


def main() -> int:
    config = parse_service_arguments("prepare")
    try:
        prepare(Console(stderr=True), config)
    except typer.Exit as ended:
        return ended.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
