"""Files written atomically."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, content: str, *, synced: bool = True) -> None:
    """Whoever reads, and a crash, finds the old file or the whole new one. Raises OSError, and then leaves nothing.

    Not `synced`, it survives the process, though perhaps not the machine.
    """
    if path.exists() and not path.is_file():
        # A pipe or a terminal, which cannot be replaced.
        path.write_text(content, encoding="utf-8")
        return
    path = path.resolve()
    staged = path.with_name(f"{path.name}.new")
    try:
        with staged.open("w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        staged.replace(path)
    except OSError:
        staged.unlink(missing_ok=True)
        raise


@contextmanager
def removed_on_failure(directory: Path, mine: bool) -> Iterator[None]:
    """Around what writes a directory that gets its name later: one that fails, as on a full disk, takes no space.

    `mine`: of several ranks, one removes it.
    """
    try:
        yield
    except BaseException:
        if mine:
            shutil.rmtree(directory, ignore_errors=True)
        raise
