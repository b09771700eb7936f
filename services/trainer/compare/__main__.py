"""python -m services.trainer.compare RUN [STEP ...] --algorithms grpo,gspo --output report.json: one process."""

import argparse
from pathlib import Path

from services.common.config import all_overrides
from services.common.config.overrides import OVERRIDES_FOR_VARIABLE
from services.common.logs import configure_logs
from services.common.run_files.compare_report import CompareReport
from services.common.run_files.recorded_steps import chosen_steps
from services.common.serving.arguments import add_output, add_overrides, leave, write_report
from services.trainer.compare.comparer import compare


def main(argv: list[str] | None = None) -> int:
    arguments = _arguments(argv)
    configure_logs("compare", arguments.run.name)
    return write_report(lambda: _compare(arguments), arguments.output)


def _compare(arguments: argparse.Namespace) -> CompareReport:
    steps = chosen_steps(arguments.run, arguments.steps)
    overrides_for = all_overrides(variable=OVERRIDES_FOR_VARIABLE)
    return compare(steps, arguments.algorithms.split(","), all_overrides(arguments.overrides), overrides_for)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.trainer.compare")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument("steps", type=int, nargs="*", metavar="STEP", help="recorded steps; without any, all")
    parser.add_argument("--algorithms", required=True, metavar="NAMES", help="separated by commas")
    add_overrides(parser)
    add_output(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    leave(main())
