"""Recorded optimizer steps: how they lie on disk, and what is known of each.

<run>/recorded/step-000123/record.json     this module's StepRecord
                           config.yaml     the configuration, without addresses and secrets
                           order.pb.zst    the StepOrder: every input of the step
                           engine/         the engine's state before the step, random state included
                           policy/         the policy before the step, as a Hugging Face checkpoint
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import yaml
import zstandard
from google.protobuf.message import DecodeError
from pydantic import AfterValidator, Field
from trivet.v1 import step_pb2

from services.common.config import Config, load_config
from services.common.errors import InvalidData
from services.common.run_files.lineage import without_addresses
from services.common.run_files.report import METRICS, Report
from services.common.run_files.run_log import renamed
from services.common.secrets import hidden

RECORDED_DIRECTORY = "recorded"
RECORD_FILE = "record.json"
CONFIG_FILE = "config.yaml"
ORDER_FILE = "order.pb.zst"
ENGINE_DIRECTORY = "engine"
POLICY_DIRECTORY = "policy"
_NAME = re.compile(r"step-(\d{6,})")
_COMPRESSION_LEVEL = 3


class StepRecord(Report):
    """`metrics` are exact: float.hex() of each. `environment` is what may change a result's last bits, by name."""

    KIND = "a step's record"
    CODE = "recording_corrupt"

    # Counted from 1: the step makes policy version `step` out of version `step - 1`.
    step: int
    run: str
    # As in every sample's lineage.
    config_version: str
    world_size: int
    zero_stage: int
    environment: dict[str, str]
    # Optimizer steps applied before.
    steps_applied: int
    digest_before: str
    digest_after: str
    metrics: Annotated[dict[str, str], AfterValidator(renamed)] = Field(validation_alias=METRICS)
    groups: int
    recorded_at: float

    @property
    def policy_version(self) -> int:
        """Of the weights that the step starts from."""
        return self.step - 1


@dataclass(frozen=True)
class RecordedStep:
    path: Path
    record: StepRecord

    @property
    def engine(self) -> Path:
        return self.path / ENGINE_DIRECTORY

    @property
    def policy(self) -> Path:
        return self.path / POLICY_DIRECTORY

    def config(self, overrides: list[str]) -> Config:
        """As recorded, then `overrides`; the process's environment has no say. Raises ConfigError."""
        return load_config(self.path / CONFIG_FILE, overrides, environment={})

    def order(self) -> step_pb2.StepOrder:
        """Raises InvalidData where the file is not one."""
        path = self.path / ORDER_FILE
        try:
            return step_pb2.StepOrder.FromString(zstandard.ZstdDecompressor().decompress(path.read_bytes()))
        except (OSError, zstandard.ZstdError, DecodeError) as error:
            raise InvalidData("recording_corrupt", f"{path} is not a recorded order ({error})") from error


def step_directory(recorded: Path, step: int) -> Path:
    return recorded / f"step-{step:06d}"


def write_order(directory: Path, order: step_pb2.StepOrder) -> None:
    packed = zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL).compress(order.SerializeToString())
    (directory / ORDER_FILE).write_bytes(packed)


def write_config(directory: Path, config: Config) -> None:
    # A scorer's or a data set's options may hold keys of their own.
    tree = hidden(without_addresses(config))
    (directory / CONFIG_FILE).write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")


def recorded_steps(run: Path) -> list[RecordedStep]:
    """Oldest first. Raises InvalidData for a record that cannot be read."""
    return [_read(path) for path in recorded_directories(run).values()]


def recorded_directories(run: Path) -> dict[int, Path]:
    """By step, oldest first; what is in them may be damaged."""
    named = ((_NAME.fullmatch(path.name), path) for path in (run / RECORDED_DIRECTORY).glob("step-*"))
    return dict(sorted((int(match[1]), path) for match, path in named if match is not None))


def recorded_step(run: Path, step: int) -> RecordedStep:
    """Raises InvalidData that names the steps there are."""
    path = step_directory(run / RECORDED_DIRECTORY, step)
    if not path.is_dir():
        there = [found.record.step for found in recorded_steps(run)]
        raise InvalidData(
            "recording_missing",
            f"step {step} of {run} is not recorded, expected one of {there}"
            if there
            else f"{run} has no recorded steps, expected some (trainer.recording.every)",
        )
    return _read(path)


def chosen_steps(run: Path, steps: Sequence[int]) -> list[RecordedStep]:
    """In that order; without any, all. Raises InvalidData where one is missing, or there is none at all."""
    found = [recorded_step(run, step) for step in steps] or recorded_steps(run)
    if not found:
        raise InvalidData("recording_missing", f"{run} has no recorded steps, expected some (trainer.recording.every)")
    return found


def consecutive_steps(run: Path, first: int, last: int) -> list[RecordedStep]:
    """Steps `first` to `last`. Raises InvalidData where one is missing or does not start where the one before ended."""
    if last < first:
        raise InvalidData("recording_range", f"the last step is {last}, expected at least the first ({first})")
    steps = [recorded_step(run, step) for step in range(first, last + 1)]
    for before, after in pairwise(steps):
        digests_compare = (before.record.world_size, before.record.zero_stage) == (
            after.record.world_size,
            after.record.zero_stage,
        )
        if digests_compare and before.record.digest_after != after.record.digest_before:
            raise InvalidData(
                "recording_broken",
                f"recorded step {after.record.step} of {run} does not start from what step {before.record.step} ended "
                "with: rerun each of the two by itself",
            )
    return steps


def _read(path: Path) -> RecordedStep:
    return RecordedStep(path, StepRecord.read(path / RECORD_FILE))
