"""The device of one process that computes without DeepSpeed."""

import torch

from services.common.config import Config
from services.common.errors import InvalidData


def plain_device(config: Config) -> torch.device:
    """Raises InvalidData where the device that the trainer is to use does not exist."""
    wanted, cuda = config.trainer.device, torch.cuda.is_available()
    if wanted == "cuda" and not cuda:
        raise InvalidData("device_missing", "trainer.device is cuda, but torch sees no CUDA device")
    return torch.device("cuda" if cuda and wanted != "cpu" else "cpu")
