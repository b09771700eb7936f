"""What the engine writes beside DeepSpeed's own state: whose checkpoint it is, and each rank's random state."""

import dataclasses
import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from services.common.config import Config
from services.common.errors import InvalidData
from services.trainer.policy import Policy

IDENTITY_FILE = "engine.json"


@dataclass(frozen=True)
class Identity:
    """A checkpoint loads only where all of this is equal. `parameters` and `dtype` are the model's."""

    model_type: str
    parameters: str
    dtype: str
    zero_stage: int
    world_size: int
    value_head: bool = False

    @classmethod
    def of(cls, policy: Policy, config: Config, world_size: int) -> "Identity":
        """To be taken before parameters are sharded. `parameters` digests names and shapes."""
        lines = [f"model.{name} {list(parameter.shape)}" for name, parameter in policy.model.named_parameters()]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        return cls(
            policy.facts.model_type,
            digest,
            config.model.dtype,
            config.trainer.zero_stage,
            world_size,
            policy.value_head is not None,
        )


def write_identity(directory: Path, identity: Identity, steps_applied: int) -> None:
    content = {**dataclasses.asdict(identity), "steps_applied": steps_applied}
    (directory / IDENTITY_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def check_identity(directory: Path, identity: Identity) -> int:
    """The number of applied steps. Raises InvalidData that names the first difference."""
    path = directory / IDENTITY_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidData("checkpoint_incomplete", f"{path} cannot be read ({error})") from error
    if not isinstance(content, dict) or not isinstance(content.get("steps_applied"), int):
        raise InvalidData("checkpoint_incomplete", f"{path} has no steps_applied")
    # A checkpoint that says nothing of a value head has none.
    found = {"value_head": False, **content}
    for name, expected in dataclasses.asdict(identity).items():
        if found.get(name) != expected:
            raise InvalidData("checkpoint_mismatch", f"{path}: {name} is {found.get(name)!r}, expected {expected!r}")
    return int(content["steps_applied"])


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


def restore_random_state(directory: Path, rank: int) -> None:
    """Raises InvalidData when the file is missing or not what write_random_state wrote."""
    path = _random_path(directory, rank)
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
