"""`ranks_worker.py DIRECTORY`: all that the DeepSpeed tests need of one rank alone, or of one of two under torchrun."""

import sys
from pathlib import Path

import torch

from services.trainer.engine.deepspeed_engine import join_process_group
from tests.integration import deepspeed_worker, sharded_worker, weights_worker


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    # Over all engines: what joins it first also leaves it.
    join_process_group(sharded_worker.configuration(directory / "none", "float32"))
    if torch.distributed.get_world_size() == 2:
        # The first, as it measures its process's memory.
        sharded_worker.main(directory / "sharded")
        for family in sorted((directory / "weights").iterdir()):
            weights_worker.main(family)
    deepspeed_worker.main(directory / "engine")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
