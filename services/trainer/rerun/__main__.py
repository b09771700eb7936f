"""python -m services.trainer.rerun RUN STEP --output report.json; under torchrun for several ranks."""

import argparse
from pathlib import Path

from services.common.config import ConfigError
from services.common.errors import InvalidData, TrivetError, one_sentence
from services.common.exit_codes import CONFIGURATION, FAILED, FINISHED
from services.common.logs import configure_logs
from services.common.run_files.atomic import write_atomically
from services.common.run_files.recorded_steps import RecordedStep, consecutive_steps
from services.common.run_files.rerun_report import RerunReport
from services.common.serving.arguments import inherited_overrides, leave, report_end
from services.trainer.rerun.rerunner import Rerunner
from services.trainer.update.open import open_updater
from services.trainer.update.reference import open_reference


def main(argv: list[str] | None = None) -> int:
    arguments = _arguments(argv)
    configure_logs("rerun", arguments.run.name)
    try:
        steps = consecutive_steps(arguments.run, arguments.step, arguments.through or arguments.step)
        report = rerun(steps, [*inherited_overrides(), *arguments.overrides])
        if report is not None:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(arguments.output, report.model_dump_json(indent=2) + "\n")
    except (ConfigError, InvalidData, ValueError) as error:
        return report_end(CONFIGURATION, str(error))
    except (TrivetError, OSError) as error:
        return report_end(FAILED, one_sentence(error))
    return FINISHED


def rerun(steps: list[RecordedStep], overrides: list[str]) -> RerunReport | None:
    """None on every rank but the first. Raises ConfigError, InvalidData, and ValueError for an unknown algorithm."""
    from services.trainer.engine.deepspeed_engine import open_engine

    config = steps[0].config(overrides)
    # The recorded policy, not the base model: it is what a step without optimizer state starts from.
    started = config.model_copy(deep=True)
    started.model.path = str(steps[0].policy)
    engine = open_engine(started)
    try:
        updater = open_updater(config, engine, open_reference(config, engine))
        report = Rerunner(config, overrides, engine, updater).rerun(steps)
        return report if engine.rank == 0 else None
    finally:
        engine.close()


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m services.trainer.rerun")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's directory")
    parser.add_argument("step", type=int, metavar="STEP", help="the first recorded step to run again")
    parser.add_argument("--through", type=int, metavar="STEP", help="the last one; without it, only the first")
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE", help="override; repeatable"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="where the report goes, as JSON")
    return parser.parse_args(argv)


if __name__ == "__main__":
    leave(main())
