"""python -m services.trainer.compare RUN [STEP ...] --algorithms grpo,gspo --output report.json: one process."""

import argparse
from pathlib import Path

from services.common.config import ConfigError
from services.common.errors import InvalidData, TrivetError
from services.common.exit_codes import CONFIGURATION, FAILED, FINISHED
from services.common.logs import configure_logs, get_logger
from services.common.service_main import leave
from services.common.step_record import chosen_steps
from services.trainer.compare.comparer import compare

log = get_logger(__name__)


def main(argv: list[str] | None = None) -> int:
    arguments = _arguments(argv)
    configure_logs("compare", arguments.run.name)
    try:
        steps = chosen_steps(arguments.run, arguments.steps)
        report = compare(steps, arguments.algorithms.split(","), arguments.overrides, arguments.overrides_for)
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    except (ConfigError, InvalidData, ValueError) as error:
        log.error("refused", reason=str(error))
        return CONFIGURATION
    except (TrivetError, OSError) as error:
        log.error("failed", reason=f"{type(error).__name__}: {error}")
        return FAILED
    return FINISHED


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.trainer.compare")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument("steps", type=int, nargs="*", metavar="STEP", help="recorded steps; without any, all")
    parser.add_argument("--algorithms", required=True, metavar="NAMES", help="with commas between")
    for option, name, metavar in (
        ("--set", "overrides", "SECTION.KEY=VALUE"),
        ("--set-for", "overrides_for", "ALGORITHM:SECTION.KEY=VALUE"),
    ):
        parser.add_argument(option, action="append", default=[], dest=name, metavar=metavar, help="repeatable")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="where the report goes, as JSON")
    return parser.parse_args(argv)


if __name__ == "__main__":
    leave(main())
