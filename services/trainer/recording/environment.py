"""What decides the last bits of a step in addition to its inputs: code, libraries, device, threads."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import xxhash

from services.common.config import Config
from services.common.run_files.lineage import code_version
from services.common.transport.weight_feed import describe_weights
from services.trainer.update.algorithm import needs_reference

PACKAGES = ("torch", "deepspeed", "transformers", "numpy")
MODEL_FILES = (".safetensors", "config.json")


def environment(config: Config, device: torch.device) -> dict[str, str]:
    """By name. `reference` digests its weights and architecture where they are in a directory."""
    found = {
        "code": code_version(),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "device": _device(device),
        "threads": str(torch.get_num_threads()),
    }
    path = Path(config.reference.path or config.model.path)
    if needs_reference(config) and path.is_dir():
        found["reference"] = _model_digest(path)
    return found


def _model_digest(directory: Path) -> str:
    """Of what the model computes with: a tokenizer or data in the same directory do not matter."""
    files = describe_weights(directory, 0).files
    lines = [f"{file.name}:{file.checksum:016x}" for file in files if file.name.endswith(MODEL_FILES)]
    return xxhash.xxh3_64_hexdigest("\n".join(lines).encode())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
