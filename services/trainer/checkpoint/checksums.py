"""What every file of a checkpoint must be, so that damage is found before anything is loaded. Ranks share the work."""

import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
import xxhash

from services.common.logs import get_logger
from services.trainer.engine.protocol import TrainEngine

READ_BYTES = 4 * 2**20

log = get_logger(__name__)


def sum_files(directory: Path, engine: TrainEngine) -> dict[str, str]:
    """Size and digest of every file, by relative name, on rank 0; empty elsewhere. Collective."""
    listing = json.dumps(_files(directory)).encode() if engine.rank == 0 else None
    names = json.loads(engine.broadcast_bytes(listing))
    mine = {name: file_sum(directory / name) for name in names[engine.rank :: engine.world_size]}
    part = directory.with_name(f"{directory.name}.sums-{engine.rank}")
    if engine.rank != 0:
        part.write_text(json.dumps(mine), encoding="utf-8")
    engine.barrier()
    if engine.rank != 0:
        return {}
    for rank in range(1, engine.world_size):
        part = directory.with_name(f"{directory.name}.sums-{rank}")
        mine |= json.loads(part.read_text(encoding="utf-8"))
        part.unlink()
    return mine


def whole(directory: Path, sums: Mapping[str, str] | None, engine: TrainEngine) -> bool:
    """Whether every file is as it was written; the same on every rank, which is collective.

    Without sums, as before they were taken, the CRCs that torch puts into its own files have to do.
    """
    if sums is None:
        names = sorted(str(path.relative_to(directory)) for path in directory.rglob("*.pt"))
    else:
        names = sorted(sums)
    damage = [
        f"{directory / name} {problem}"
        for name in names[engine.rank :: engine.world_size]
        if (problem := _problem(directory / name, sums[name] if sums is not None else None)) is not None
    ]
    for sentence in damage:
        log.warning("checkpoint damaged", reason=sentence)
    return not engine.all_reduce(torch.tensor([len(damage)]), "max").item()


def file_sum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
    return f"{path.stat().st_size}:{digest.hexdigest()}"


def _files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def _problem(path: Path, expected: str | None) -> str | None:
    try:
        if expected is None:
            return _crc_problem(path)
        found = file_sum(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error})"
    return None if found == expected else f"is {found} (bytes:digest), expected {expected}"


def _crc_problem(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        return f"is damaged or cut short ({error})"
    return None if damaged is None else f"is damaged in {damaged}"
