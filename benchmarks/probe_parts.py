"""What the probes of gpu_check share: a place, its configuration, and samples under way while the weights change."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trivet.v1 import sample_pb2

from services.common.config import Config, parse_config

Device = Literal["cuda", "cpu"]
TOP_K, PROMPT = 20, [5, 20, 33, 41, 60, 72, 80, 91]
MAX_LENGTH = 512
# Long enough to be under way whenever an update comes.
LONG = 480


class Skipped(Exception):
    """Cannot be tried here; the message says why."""


@dataclass(frozen=True)
class Place:
    directory: Path
    device: Device

    @property
    def model(self) -> Path:
        return self.directory / "model"


def configuration(place: Place, dtype: str, *, stage: int = 1, **sections: dict[str, Any]) -> Config:
    return parse_config(
        {
            "run": {"name": "gpu-check", "directory": str(place.directory / "runs")},
            "model": {"path": str(place.model), "dtype": dtype, "max_length": MAX_LENGTH},
            "data": {"train": {"kind": "jsonl", "path": str(place.model / "train.jsonl")}, "max_prompt_tokens": 32},
            "sampling": {"max_tokens": 32, "top_k": TOP_K},
            "rl_stability": {"unbiased_kl": {"enabled": False}},
            "reward": {"scorers": [{"name": "exact_match"}]},
            "trainer": {"device": place.device, "steps": 10, "zero_stage": stage, "tokens_per_microbatch": MAX_LENGTH},
            **sections,
        }
    )


def sampling_parameters(*, top_k: int = 0, top_p: float = 1.0, max_tokens: int = 32) -> sample_pb2.SamplingParameters:
    return sample_pb2.SamplingParameters(temperature=1.0, top_k=top_k, top_p=top_p, max_tokens=max_tokens)


async def under_way(engine: Any) -> "asyncio.Task[list[Any]]":
    """Eight long samples that have begun: vLLM takes what came first first, and one that came later has ended."""
    long = sampling_parameters(top_k=TOP_K, max_tokens=LONG)
    samples = asyncio.create_task(engine.generate(PROMPT, long, [f"u/{i}" for i in range(8)], capture=True))
    await engine.generate(PROMPT, sampling_parameters(top_k=TOP_K, max_tokens=1), ["first"], capture=True)
    return samples


def count_mixed(samples: list[Any]) -> int:
    """How many began under version 0 and continued under version 1; raises if none did."""
    mixed = [sample for sample in samples if [span.version for span in sample.spans] == [0, 1]]
    if not mixed:
        raise RuntimeError("no sample was under way when the weights changed, expected two versions in one")
    return len(mixed)
