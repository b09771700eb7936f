"""python -m services.trainer.check --config FILE --output report.json: what would keep a trainer from starting.

It loads no model, and looks at the first rows of large data only: the trainer itself looks at all of them as it starts.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from services.common.config import Config, DataConfig, load_config
from services.common.data.rows import read_rows
from services.common.errors import InvalidData, TrivetError
from services.common.run_files.check_report import CheckReport
from services.common.serving.arguments import leave
from services.trainer.data.model_files import check_model, model_paths, open_tokenizer, unstopped_turn
from services.trainer.data.preferences import load_preferences
from services.trainer.data.prompts import load_prompts
from services.trainer.update.algorithm import configured_algorithm

ROWS = 10_000


def report(config: Config) -> CheckReport:
    found = find_problems(config)
    made = config.prepare is None or config.prepare.done
    doubt = None
    if made and not found and config.data.preferences is None:
        doubt = unstopped_turn(config, open_tokenizer(config.model.path))
    return CheckReport(findings=tuple(found), doubts=() if doubt is None else (doubt,))


def find_problems(config: Config) -> list[str]:
    """A sentence for each. Model and data are left out while what makes them has not run (prepare)."""
    found = _problem(lambda: configured_algorithm(config))
    if config.prepare is not None and not config.prepare.done:
        return found
    for key, path in model_paths(config):
        found += _problem(partial(check_model, path, key))
    # Without its model there is no tokenizer: the rows are read as they stand.
    tokenizes = not any("model.path" in sentence for sentence in found)
    return found + _problem(lambda: _read_data(config) if tokenizes else _read_rows(config.data))


def _read_data(config: Config) -> None:
    tokenizer = open_tokenizer(config.model.path)

    def read(most: int | None) -> None:
        if config.data.preferences is not None:
            load_preferences(config, tokenizer, most)
        else:
            load_prompts(config.data, tokenizer, config.run.seed, most)

    try:
        read(ROWS)
    except InvalidData as error:
        # What the first rows lack the others may have.
        if error.code != "data_empty":
            raise
        read(None)


def _read_rows(data: DataConfig) -> None:
    for name in ("train", "validation", "preferences"):
        source = getattr(data, name)
        if source is not None:
            for _ in read_rows(source, f"data.{name}", ROWS):
                pass


def _problem(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except (TrivetError, ValueError) as error:
        return [str(error)]
    return []


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m services.trainer.check")
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's YAML")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="where the report goes, as JSON")
    arguments = parser.parse_args(argv)
    arguments.output.write_text(report(load_config(arguments.config)).model_dump_json(), encoding="utf-8")


if __name__ == "__main__":
    main()
    leave(0)
