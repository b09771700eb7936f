"""A run with recorded steps, made with the plain engine, whose state can be saved and loaded here."""

import functools
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from trivet.v1 import sample_pb2, step_pb2

from services.common.config import Config
from services.common.errors import InvalidData
from services.common.wire.replay_data import Replay, encode_replay
from services.trainer.batch.groups import batch_samples
from services.trainer.model.policy import Policy, load_policy
from services.trainer.recording.recorder import Recorder
from services.trainer.update.open import open_updater
from tests.support.trainer.model_families import make_model
from tests.support.trainer.plain_engine import DescentEngine, update_configuration

RATE = 0.05
GROUPS, GROUP_SIZE = 3, 4
SECRET = "a-token-that-nobody-may-read"
STATE = "state.safetensors"


class SavingEngine(DescentEngine):
    """`saved_by` names who can load it: as ranks and ZeRO stage do for the real one."""

    def __init__(self, policy: Policy, saved_by: str = "plain") -> None:
        super().__init__(policy, RATE)
        self._saved_by = saved_by

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        state = {name: value.clone() for name, value in self.policy.model.named_parameters()}
        save_file(state, directory / STATE, {"steps": str(self.steps_applied), "by": self._saved_by})

    def load(self, directory: Path) -> None:
        from safetensors import safe_open

        with safe_open(directory / STATE, "pt") as stored:
            metadata = stored.metadata()
        if metadata["by"] != self._saved_by:
            raise InvalidData("checkpoint_mismatch", f"saved by {metadata['by']}, expected {self._saved_by}")
        state = load_file(directory / STATE)
        with torch.no_grad():
            for name, parameter in self.policy.model.named_parameters():
                parameter.copy_(state[name])
        self.steps_applied = int(metadata["steps"])

    def export(self, directory: Path) -> None:
        self.policy.model.save_pretrained(directory)


def make_base(directory: Path) -> Path:
    _base().save_pretrained(directory)
    return directory


@functools.cache
def _base() -> Any:
    return make_model("qwen3", dtype=torch.float32)


def configuration(directory: Path, **recording: Any) -> Config:
    """Two mini-batches and a token left secret; the base model is in `directory`/base."""
    return update_configuration(
        run={"name": "recorded", "directory": str(directory / "runs")},
        model={"path": str(directory / "base")},
        sampling={"group_size": GROUP_SIZE},
        algorithm={"clip_high": 0.25, "advantage_normalization": "std"},
        trainer={
            "server": {"token": SECRET},
            "recording": {"every": 1, **recording},
            "groups_per_step": GROUPS,
            "device": "cpu",
        },
        redis={"url": f"redis://:{SECRET}@127.0.0.1:6379/0"},
    )


def make_order(step: int, rewards: list[float] | None = None) -> step_pb2.StepOrder:
    """Each group has one good sample of four unless `rewards` says otherwise; log-probs are those of no model."""
    order = step_pb2.StepOrder(action=step_pb2.STEP_ACTION_TRAIN)
    generator = torch.Generator().manual_seed(step)
    for number in range(GROUPS):
        scored = order.groups.add()
        prompt = scored.group.prompt
        prompt.group_id, prompt.group_size = f"step{step}-{number}", GROUP_SIZE
        prompt.token_ids.extend(torch.randint(3, 96, (3,), generator=generator).tolist())
        prompt.sampling.temperature, prompt.sampling.max_tokens = 1.0, 8
        for index in range(GROUP_SIZE):
            tokens = torch.randint(3, 96, (2 + index,), generator=generator).tolist()
            sample = sample_pb2.Sample(
                sample_id=f"{prompt.group_id}/{index}",
                index=index,
                token_ids=tokens,
                logprobs=[-4.5] * len(tokens),
                finish_reason=sample_pb2.FINISH_REASON_STOP,
            )
            scored.group.samples.append(sample)
            scored.scores.add(reward=rewards[index] if rewards else float(index == number))
            order.replay.append(encode_replay(sample.sample_id, Replay()))
    return order


def open_plain(config: Config, saved_by: str = "plain") -> SavingEngine:
    return SavingEngine(load_policy(config.model.path, dtype="float32"), saved_by)


def record_run(directory: Path, steps: int, **recording: Any) -> Path:
    """The run's directory."""
    make_base(directory / "base")
    config = configuration(directory, **recording)
    engine = open_plain(config)
    train(config, engine, Recorder(config, engine), range(1, steps + 1))
    return config.run.path


def train(config: Config, engine: SavingEngine, recorder: Recorder, steps: range) -> None:
    updater = open_updater(config, engine, None)
    for step in steps:
        order = make_order(step)
        due = recorder.due(step)
        if due:
            recorder.begin(step, order)
        metrics = updater.train(batch_samples(order, config, engine.facts))
        if due:
            recorder.finish(metrics)
