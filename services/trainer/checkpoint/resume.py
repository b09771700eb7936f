"""The newest intact checkpoint, loaded by all ranks; damaged ones are put aside on the way."""

import json
from collections.abc import Callable

from services.common.errors import InvalidData
from services.common.logs import get_logger
from services.trainer.checkpoint.checksums import whole
from services.trainer.checkpoint.directory import Checkpoints, SavedCheckpoint, read_checkpoint
from services.trainer.engine.protocol import TrainEngine
from services.trainer.metrics import counters

DAMAGED_CODES = {"checkpoint_corrupt", "checkpoint_incomplete"}

log = get_logger(__name__)


def take_up(
    checkpoints: Checkpoints, engine: TrainEngine, fits: Callable[[SavedCheckpoint], None]
) -> SavedCheckpoint | None:
    """Loads it into the engine; None where the run begins. Collective.

    `fits` raises for a checkpoint that the run cannot resume from. Raises InvalidData for that, and where every
    checkpoint is damaged: to start over silently would be a loss.
    """
    if engine.rank == 0:
        checkpoints.recover()
    while (saved := _newest(checkpoints, engine)) is not None:
        if whole(saved.path, saved.sums, engine):
            fits(saved)
            if _loaded(saved, engine) and engine.finite():
                return saved
        if engine.rank == 0:
            counters.CHECKPOINTS_DAMAGED.inc()
            aside = checkpoints.set_aside(saved.path)
            log.warning(
                "checkpoint is damaged: put aside, an older one is taken", step=saved.state.step, kept=str(aside)
            )
    return None


def _newest(checkpoints: Checkpoints, engine: TrainEngine) -> SavedCheckpoint | None:
    """Rank 0's choice on every rank: others may see the directory later than it."""
    chosen = None
    if engine.rank == 0:
        latest, damaged = checkpoints.latest(), checkpoints.damaged()
        refusal = None
        if latest is None and damaged:
            refusal = (
                f"every checkpoint of the run is damaged, the newest is kept as {damaged[-1]}: begin again with "
                "--fresh or under another run.name, or put a copy of a good one in its place"
            )
        chosen = json.dumps({"path": None if latest is None else str(latest.path), "refusal": refusal}).encode()
    shared = json.loads(engine.broadcast_bytes(chosen))
    if shared["refusal"] is not None:
        raise InvalidData("checkpoint_corrupt", shared["refusal"])
    return None if shared["path"] is None else read_checkpoint(shared["path"])


def _loaded(saved: SavedCheckpoint, engine: TrainEngine) -> bool:
    """False for damage that only loading shows, in a checkpoint from before there were sums.

    One rank alone can say so: of several, the others would wait for it.
    """
    try:
        engine.load(saved.engine)
    except InvalidData as error:
        if saved.sums is not None or engine.world_size > 1 or error.code not in DAMAGED_CODES:
            raise
        log.warning("checkpoint damaged", reason=str(error))
        return False
    return True
