"""Makes what configs/quickstart*.yaml train: `python -m examples.quickstart OUTPUT_DIR [--seed N]`."""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from transformers.utils import logging as transformers_logging

from examples.quickstart.evaluate import GREEDY, Sampling, accuracy
from examples.quickstart.model import build_model
from examples.quickstart.task import draw_preferences, draw_split, write_jsonl
from examples.quickstart.tokenizer import build_tokenizer
from examples.quickstart.warmup import WarmupSettings, warm_up

MAX_LENGTH = 64


@dataclass(frozen=True)
class Sizes:
    """Rows; `probe` of the training rows decide when the warm-up stops."""

    train: int = 4000
    validation: int = 256
    probe: int = 256


@dataclass(frozen=True)
class Report:
    """What warmup.json holds. Accuracies are on the validation prompts, which the warm-up never saw."""

    seed: int
    parameters: int
    steps: int
    seconds: float
    loss: float
    target_reached: bool
    sampled_accuracy: float
    greedy_accuracy: float
    settings: dict[str, float]


def build(
    output: Path, seed: int, settings: WarmupSettings, *, sizes: Sizes | None = None, console: Console | None = None
) -> Report:
    """Makes, warms up and writes everything; `output` appears atomically.

    Raises FileExistsError where `output` holds something already.
    """
    sizes = sizes or Sizes()
    _refuse_existing(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([seed, 0])
    validation = draw_split(rng, "validation", sizes.validation)
    held_out = frozenset(problem.prompt for problem in validation)
    train = draw_split(rng, "train", sizes.train, held_out)
    preferences = draw_preferences(
        train, np.random.default_rng([seed, 1]), forget_rate=settings.forget_rate, typo_rate=settings.typo_rate
    )
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed, max_length=MAX_LENGTH)
    sampling = Sampling()
    result = warm_up(
        model,
        tokenizer,
        train[: sizes.probe],
        held_out=held_out,
        seed=seed,
        settings=settings,
        sampling=sampling,
        console=console,
    )
    report = Report(
        seed=seed,
        parameters=model.num_parameters(),
        steps=result.steps,
        seconds=round(result.seconds, 2),
        loss=result.loss,
        target_reached=result.accuracy >= settings.target_accuracy,
        sampled_accuracy=accuracy(model, tokenizer, validation, sampling, samples=4, seed=seed),
        greedy_accuracy=accuracy(model, tokenizer, validation, GREEDY),
        settings=asdict(settings),
    )
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as temporary:
        # One level down: the temporary directory itself is readable by its owner alone.
        directory = Path(temporary) / output.name
        model.save_pretrained(directory)
        # safetensors writes for its owner alone; in containers the services run as other users.
        (directory / "model.safetensors").chmod(0o644)
        tokenizer.save_pretrained(directory)
        write_jsonl(directory / "train.jsonl", train)
        write_jsonl(directory / "validation.jsonl", validation)
        write_jsonl(directory / "preferences.jsonl", preferences)
        (directory / "warmup.json").write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
        _refuse_existing(output)
        os.rename(directory, output)
    return report


def _refuse_existing(output: Path) -> None:
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise FileExistsError(f"OUTPUT_DIR is {output}, which holds something already: expected a new path")


def _seed(text: str) -> int:
    seed = int(text)
    if not 0 <= seed < 2**32:
        raise argparse.ArgumentTypeError(f"--seed is {seed}, expected 0 to {2**32 - 1}")
    return seed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.quickstart", description=__doc__)
    parser.add_argument("output", metavar="OUTPUT_DIR", type=Path)
    parser.add_argument("--seed", type=_seed, default=1)
    options = parser.parse_args(arguments)
    # The order of float additions depends on the number of threads, and with it what a seed gives.
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    console = Console(stderr=True)
    try:
        report = build(options.output, options.seed, WarmupSettings(), console=console)
    except FileExistsError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    console.print(
        f"{options.output}: {report.parameters:,} parameters, {report.steps} steps in {report.seconds:.0f} s; "
        f"held-out accuracy {report.sampled_accuracy:.2f} sampled, {report.greedy_accuracy:.2f} greedy"
    )
    if not report.target_reached:
        console.print(f"[yellow]stopped at the bound of {report.steps} steps, before the target accuracy[/yellow]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
