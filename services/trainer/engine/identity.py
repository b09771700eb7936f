"""What the engine writes in addition to DeepSpeed's own state: whose checkpoint it is, and each rank's random state."""

import dataclasses
import hashlib
import json
import random
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from services.common.config import Config
from services.common.errors import InvalidData
from services.trainer.model.policy import Policy
from services.trainer.model.sharding import whole_shape

IDENTITY_FILE = "engine.json"
# What decides each part of an identity.
KEYS = {
    "model_type": "model.path",
    "parameters": "model.path",
    "dtype": "model.dtype",
    "zero_stage": "trainer.zero_stage",
    "value_head": "algorithm.name and algorithm.critic",
    "critic": "algorithm.critic and algorithm.critic_path",
}


@dataclass(frozen=True)
class Identity:
    """A checkpoint loads only where all of this is equal, except for how it is sharded: see Saved.

    `parameters` and `critic` digest names and shapes.
    """

    model_type: str
    parameters: str
    dtype: str
    zero_stage: int
    world_size: int
    value_head: bool = False
    # Of a critic of its own; empty without one.
    critic: str = ""

    @classmethod
    def of(cls, policy: Policy, config: Config, world_size: int) -> "Identity":
        return cls(
            policy.facts.model_type,
            _digest("model", policy.model),
            config.model.dtype,
            config.trainer.zero_stage,
            world_size,
            policy.value_head is not None,
            _digest("critic", policy.critic) if policy.critic is not None else "",
        )


@dataclass(frozen=True)
class Saved:
    """What a checkpoint that fits says of itself."""

    steps_applied: int
    zero_stage: int
    world_size: int
    # The engine's state_digest; None where none was written.
    state_digest: str | None

    def is_cut_as(self, identity: Identity) -> bool:
        """Whether each rank finds exactly the shard that it would have written."""
        return (self.zero_stage, self.world_size) == (identity.zero_stage, identity.world_size)


def _digest(part: str, module: nn.Module) -> str:
    lines = [f"{part}.{name} {list(whole_shape(parameter))}" for name, parameter in module.named_parameters()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def write_identity(directory: Path, identity: Identity, steps_applied: int, state_digest: str) -> None:
    content = {**dataclasses.asdict(identity), "steps_applied": steps_applied, "state_digest": state_digest}
    (directory / IDENTITY_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def check_identity(directory: Path, identity: Identity) -> Saved:
    """Raises InvalidData that names the first difference.

    Any number of ranks fits. ZeRO 1 and 2 keep the same state; DeepSpeed carries none between them and ZeRO-3.
    """
    path = directory / IDENTITY_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidData("checkpoint_incomplete", f"{path} cannot be read ({error})") from error
    for name in ("steps_applied", "zero_stage", "world_size"):
        if not isinstance(content, dict) or type(content.get(name)) is not int:
            raise InvalidData("checkpoint_incomplete", f"{path} has no {name}, expected a whole number")
    # A checkpoint that says nothing of a value head or a critic has none.
    found = {"value_head": False, "critic": "", **content}
    expectations = dataclasses.asdict(identity)
    del expectations["world_size"]
    if (content["zero_stage"] == 3) == (identity.zero_stage == 3):
        del expectations["zero_stage"]
    for name, expected in expectations.items():
        if found.get(name) != expected:
            raise InvalidData(
                "checkpoint_mismatch",
                f"{path}: {name} is {found.get(name)!r}, expected {expected!r}: give {KEYS[name]} the old value, or "
                "run.name a new one",
            )
    saved = Saved(content["steps_applied"], content["zero_stage"], content["world_size"], content.get("state_digest"))
    if not saved.is_cut_as(identity) and saved.steps_applied == 0:
        raise InvalidData(
            "checkpoint_mismatch",
            f"{path}: no step was applied, so there is no optimizer state to shard again; expected {saved.world_size} "
            f"ranks and ZeRO {saved.zero_stage}, or a start from the model",
        )
    return saved


def check_shards(directory: Path, saved: Saved) -> None:
    """Raises InvalidData where a shard is missing or cut short, so that all ranks fail alike and none waits.

    Looks at each file's table of contents, which is at its end, not at all its bytes.
    """
    for kind, expected in {
        "optim_states": saved.world_size,
        "model_states": saved.world_size if saved.zero_stage == 3 else 1,
    }.items():
        paths = sorted(directory.glob(f"*{kind}.pt"))
        if len(paths) != expected:
            raise InvalidData(
                "checkpoint_corrupt", f"{directory} has {len(paths)} files *{kind}.pt, expected {expected}"
            )
        for path in paths:
            if not zipfile.is_zipfile(path):
                raise InvalidData("checkpoint_corrupt", f"{path} is damaged or cut short")


def write_random_state(directory: Path, rank: int) -> None:
    version, words, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=False)
    tensors = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "numpy": torch.from_numpy(legacy["state"]["key"].astype(np.int64)),
    }
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    scalars = {
        "python_version": version,
        "python_gauss": gauss,
        "numpy_pos": int(legacy["state"]["pos"]),
        "numpy_has_gauss": int(legacy["has_gauss"]),
        "numpy_gauss": float(legacy["gauss"]),
    }
    save_file(tensors, _random_path(directory, rank), metadata={"scalars": json.dumps(scalars)})


def restore_random_state(directory: Path, rank: int, saved_ranks: int) -> None:
    """A rank past the `saved_ranks` takes a state that follows from rank 0's and its own number.

    Raises InvalidData when the file is missing or not what write_random_state wrote.
    """
    known = rank < saved_ranks
    _restore(_random_path(directory, rank if known else 0))
    if not known:
        _branch(rank)


def _branch(rank: int) -> None:
    state = torch.get_rng_state().numpy().tobytes()
    seed = int.from_bytes(hashlib.sha256(state + rank.to_bytes(4, "little")).digest()[:8], "little")
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _restore(path: Path) -> None:
    try:
        with safe_open(path, framework="pt") as stored:
            tensors: dict[str, Tensor] = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            scalars = json.loads((stored.metadata() or {})["scalars"])
        random.setstate((scalars["python_version"], tuple(tensors["python"].tolist()), scalars["python_gauss"]))
        np.random.set_state(
            {
                "bit_generator": "MT19937",
                "state": {"key": tensors["numpy"].numpy().astype(np.uint32), "pos": scalars["numpy_pos"]},
                "has_gauss": scalars["numpy_has_gauss"],
                "gauss": scalars["numpy_gauss"],
            }
        )
        torch.set_rng_state(tensors["torch"])
        if "cuda" in tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["cuda"])
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise InvalidData("checkpoint_incomplete", f"{path} is not a random state ({error})") from error


def _random_path(directory: Path, rank: int) -> Path:
    return directory / f"random-{rank}.safetensors"
