"""python -m services.trainer.rerun RUN STEP --output report.json; under torchrun for several ranks."""

import argparse
from pathlib import Path

from services.common.config import all_overrides
from services.common.logs import configure_logs
from services.common.run_files.recorded_steps import RecordedStep, consecutive_steps
from services.common.run_files.rerun_report import RerunReport
from services.common.serving.arguments import add_output, add_overrides, leave, write_report
from services.trainer.rerun.rerunner import Rerunner
from services.trainer.update.open import open_updater
from services.trainer.update.reference import open_reference


def main(argv: list[str] | None = None) -> int:
    arguments = _arguments(argv)
    configure_logs("rerun", arguments.run.name)
    return write_report(lambda: _rerun(arguments), arguments.output)


def _rerun(arguments: argparse.Namespace) -> RerunReport | None:
    steps = consecutive_steps(arguments.run, arguments.step, arguments.through or arguments.step)
    return rerun(steps, all_overrides(arguments.overrides))


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
    add_overrides(parser)
    add_output(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    leave(main())
