"""python -m services.trainer.compare RUN [STEP ...] --algorithms grpo,gspo --output report.json: one process."""

import argparse
from pathlib import Path

from services.common.config import ConfigError
from services.common.errors import InvalidData, TrivetError, one_sentence
from services.common.exit_codes import CONFIGURATION, FAILED, FINISHED
from services.common.logs import configure_logs
from services.common.run_files.atomic import write_atomically
from services.common.run_files.recorded_steps import chosen_steps
from services.common.serving.arguments import OVERRIDES_FOR_VARIABLE, inherited_overrides, leave, report_end
from services.trainer.compare.comparer import compare


def main(argv: list[str] | None = None) -> int:
    arguments = _arguments(argv)
    configure_logs("compare", arguments.run.name)
    try:
        steps = chosen_steps(arguments.run, arguments.steps)
        overrides = [*inherited_overrides(), *arguments.overrides]
        overrides_for = inherited_overrides(OVERRIDES_FOR_VARIABLE)
        report = compare(steps, arguments.algorithms.split(","), overrides, overrides_for)
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(arguments.output, report.model_dump_json(indent=1) + "\n")
    except (ConfigError, InvalidData, ValueError) as error:
        return report_end(CONFIGURATION, str(error))
    except (TrivetError, OSError) as error:
        return report_end(FAILED, one_sentence(error))
    return FINISHED


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.trainer.compare")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument("steps", type=int, nargs="*", metavar="STEP", help="recorded steps; without any, all")
    parser.add_argument("--algorithms", required=True, metavar="NAMES", help="separated by commas")
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE", help="override; repeatable"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="where the report goes, as JSON")
    return parser.parse_args(argv)


if __name__ == "__main__":
    leave(main())
