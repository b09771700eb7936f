"""python -m benchmarks.sizing: the tables of docs/scaling.md, or those of one configuration."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from benchmarks.sizing.architecture import MODELS
from benchmarks.sizing.assumptions import GPUS, Assumptions
from benchmarks.sizing.case import Case, example_cases
from benchmarks.sizing.plot import plot
from benchmarks.sizing.tables import tables
from services.common.config import ConfigError, load_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 2 where the configuration is refused or cannot keep up."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sizing", description=__doc__)
    names = {model.name: model for model in MODELS}
    parser.add_argument("--config", type=Path, help="a run's YAML; without it, the three examples")
    parser.add_argument("--model", choices=names, default="30B-A3B", help="the model's dimensions, for --config")
    parser.add_argument("--gpu", choices=GPUS, default="H100", help="for --config")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="also draw the bytes of a sample")
    parser.add_argument("--prompt", type=int, default=512, help="mean tokens of a prompt")
    parser.add_argument("--completion", type=int, default=7680, help="mean tokens of a completion")
    parser.add_argument("--candidates", type=float, default=4.0, help="mean size of a candidate set")
    for field in fields(Assumptions):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=type(field.default), default=field.default, help="assumption: %(default)s")
    options = parser.parse_args(arguments)
    assumptions = Assumptions(**{field.name: getattr(options, field.name) for field in fields(Assumptions)})
    lengths = {"prompt": options.prompt, "completion": options.completion, "candidates": options.candidates}
    try:
        if options.config is None:
            cases = [replace(case, assumptions=assumptions) for case in example_cases(**lengths)]
        else:
            model, gpu = names[options.model], GPUS[options.gpu]
            cases = [Case.of(model, gpu, load_config(options.config), assumptions, **lengths)]
        sys.stdout.write(tables(cases))
        if options.plot is not None:
            plot(cases, options.plot)
    except (ConfigError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
