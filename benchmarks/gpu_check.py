"""What of Trivet works on this machine's GPU, line by line, with a tiny MoE model made on the spot.

    python -m benchmarks.gpu_check                    one GPU
    python -m benchmarks.gpu_check --device cpu       the lines that make sense without one

Each line is a process of its own and its own try. Status 1 where one fails; one that cannot be tried here says why.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.gpu_probes import PROBES
from benchmarks.probe_parts import MAX_LENGTH, Device, Place, Skipped
from services.common.run_files.audit_report import AuditReport

ROOT = Path(__file__).parents[1]
QUICKSTART = "configs/quickstart.yaml"
SKIPPED = 77
LINE_SECONDS = {"cuda": 150.0, "cpu": 240.0}
# Ten minutes for all of them.
ALL_SECONDS = 600.0
# Rollout and trainer share the GPU.
CUDA = {"model.dtype": "bfloat16", "rollout.engine.gpu_memory_utilization": "0.3"}


@dataclass(frozen=True)
class Line:
    name: str
    command: tuple[str, ...]
    # What to say of it when it works; without, its own last words.
    summary: Callable[[], str] | None = None


def lines(place: Place) -> Iterator[Line]:
    for name in PROBES:
        yield Line(name, _module("benchmarks.gpu_check", "--probe", name, "--in", str(place.directory), place.device))
    cuda = place.device == "cuda"
    for capture in ("native", "worker_extension") if cuda else ("worker_extension",):
        name = f"audit-{capture.replace('_', '-')}"
        trivet = _module("services.cli", "audit", QUICKSTART, "--samples", "64")
        report = place.directory / "runs" / name / "audit.json"
        settings = _settings(place, name, {"rollout.capture": capture})
        yield Line(name, (*trivet, *settings), partial(_agreement, report))
    steps = {"trainer.steps": "5", "evaluation.prompts": "16", "evaluation.samples": "0"}
    yield Line("up-5-steps", (*_module("services.cli", "up", QUICKSTART), *_settings(place, "up", steps)))


def _agreement(path: Path) -> str:
    report = AuditReport.model_validate_json(path.read_bytes())
    found = report.row(*report.configured)
    return (
        f"{report.tokens} tokens: ratio {found.ratio_mean:.5f}, KL {found.mismatch_kl:.1e}, "
        f"|Δ log-prob| at most {found.difference_max:.1e}"
    )


def _settings(place: Place, run: str, more: dict[str, str]) -> list[str]:
    settings = {
        "run.name": run,
        "run.directory": str(place.directory / "runs"),
        "model.path": str(place.model),
        "data.train.path": str(place.model / "train.jsonl"),
        "data.validation.path": str(place.model / "validation.jsonl"),
        "prepare": "null",
        "trainer.device": place.device,
        **(CUDA if place.device == "cuda" else {}),
        **more,
    }
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def _module(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", *words)


def attempt(line: Line, seconds: float, log: Path) -> tuple[int | None, str]:
    """Status, None after a timeout, and the last words. Whatever the process started ends with it."""
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}",
        "COLUMNS": "160",
    }
    errors = log.with_suffix(".err")
    with log.open("wb") as output, errors.open("wb") as error_output:
        process = subprocess.Popen(
            line.command, cwd=ROOT, env=environment, stdout=output, stderr=error_output, start_new_session=True
        )
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    said = _last_words(log)
    return status, said if status in {0, SKIPPED} else " / ".join(filter(None, [said, _last_words(errors)]))


def _last_words(log: Path) -> str:
    words = [text.strip() for text in log.read_text(encoding="utf-8", errors="replace").splitlines() if text.strip()]
    return words[-1] if words else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def check(device: Device, only: Sequence[str]) -> int:
    failed, deadline = 0, time.monotonic() + ALL_SECONDS
    with tempfile.TemporaryDirectory(prefix="trivet-gpu-check-", ignore_cleanup_errors=True) as directory:
        place = Place(Path(directory), device)
        make_models(place)
        for line in lines(place):
            if only and line.name not in only:
                continue
            start = time.monotonic()
            seconds = max(1.0, min(LINE_SECONDS[device], deadline - start))
            status, words = attempt(line, seconds, place.directory / f"{line.name}.log")
            if status is None:
                words = f"no end after {seconds:g} seconds; last: {words}"
            failed += status not in {0, SKIPPED}
            if status == 0 and line.summary is not None:
                words = line.summary()
            mark = {0: "works  ", SKIPPED: "skipped"}.get(status if status is not None else -1, "FAILS  ")
            _say(f"{mark} {line.name:26} {time.monotonic() - start:6.1f} s  {words}")
    _say(f"{failed} failed" if failed else "nothing failed")
    return 1 if failed else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def make_models(place: Place) -> None:
    """The quickstart's model with random weights, a second one, and its task."""
    import numpy as np

    from examples.quickstart.model import build_model
    from examples.quickstart.task import draw_split, write_jsonl
    from examples.quickstart.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    for seed, path in enumerate((place.model, place.directory / "other"), start=1):
        build_model(tokenizer, seed, max_length=MAX_LENGTH).save_pretrained(path)
        tokenizer.save_pretrained(path)
    random = np.random.default_rng(1)
    validation = draw_split(random, "validation", 32)
    train = draw_split(random, "train", 512, frozenset(problem.prompt for problem in validation))
    write_jsonl(place.model / "train.jsonl", train)
    write_jsonl(place.model / "validation.jsonl", validation)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", metavar="LINE", nargs="+", default=[])
    parser.add_argument("--probe", choices=tuple(PROBES), help=argparse.SUPPRESS)
    parser.add_argument("--in", dest="place", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe is None:
        return check(options.device, options.only)
    try:
        _say(PROBES[options.probe](Place(Path(options.place[0]), options.place[1])))
    except Skipped as reason:
        _say(str(reason))
        return SKIPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
