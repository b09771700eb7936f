"""What commands print on: the text may come from anywhere, and nobody need be there to read it."""

import errno
import os
import sys
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from services.common.secrets import without_secrets
from services.common.wire.text import readable

MAX_CHARACTERS = 10_000


class PlainConsole(Console):
    """Prints names, paths and messages as they are: nothing is read as markup, control characters, which could steer
    the terminal, become U+FFFD, and passwords in addresses are hidden. Without TERM, nothing is redrawn.
    """

    def __init__(self) -> None:
        interactive = None if os.environ.get("TERM") else False
        output: Any = _Output(sys.stdout)
        super().__init__(file=output, markup=False, emoji=False, highlight=False, force_interactive=interactive)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(readable(without_secrets(text), MAX_CHARACTERS), **options)


class _Output:
    """Standard output, which may fail at any time: no run is to end for it, or to stay behind unfinished."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._failed(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        # A terminal or pipe that is closed does not come back; a disk that is full may have space again.
        if error.errno in {errno.EPIPE, errno.EIO}:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
