"""How often the trainer has ended in the middle of a step, by the groups that the step was made of.

An entry that takes the whole process with it, by a crash or all of the memory, would do so again after each restart.
Nothing says which of a step's groups it was, so it counts against all of them.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from services.common.errors import InvalidData
from services.common.logs import get_logger
from services.common.run_files.atomic import write_atomically

TRAINER_ENDED = "trainer_ended"

log = get_logger(__name__)


class Deaths:
    """Of rank 0. Groups are named by their request, which stands for the same prompt after every restart."""

    def __init__(self, path: Path, limit: int) -> None:
        """The file at `path` holds the counts and the step under way: one that was not finished counts now."""
        self._path, self._limit = path, limit
        self._counts, unfinished = _read(path)
        if unfinished:
            log.warning("the trainer ended in the middle of a step", requests=unfinished)
            self._counts |= {request: self._counts.get(request, 0) + 1 for request in unfinished}
            self._write([])

    def check(self, request: int) -> None:
        """Raises InvalidData ("trainer_ended") where the trainer has ended in the group's steps too often."""
        count = self._counts.get(request, 0)
        if count >= self._limit:
            raise InvalidData(
                TRAINER_ENDED,
                f"the trainer ended {count} times in the middle of a step with request {request}, fewer than "
                f"{self._limit} expected (redis.max_deliveries)",
            )

    @contextmanager
    def step(self, requests: Sequence[int]) -> Iterator[None]:
        """Around a training step of these groups."""
        self._write(requests)
        yield
        for request in requests:
            self._counts.pop(request, None)
        self._write([])

    def _write(self, under_way: Sequence[int]) -> None:
        content = {"deaths": self._counts, "step": list(under_way)}
        # A machine that goes down says nothing about an entry.
        write_atomically(self._path, json.dumps(content), synced=False)


def _read(path: Path) -> tuple[dict[int, int], list[int]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {int(request): int(count) for request, count in content["deaths"].items()}, list(
            map(int, content["step"])
        )
    except FileNotFoundError:
        pass
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        log.warning("what is known of earlier deaths is damaged: counted from 0", file=str(path), reason=repr(error))
    return {}, []
