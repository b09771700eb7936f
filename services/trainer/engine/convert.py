"""A checkpoint by parameter instead of by rank, which any number of ranks loads.

DeepSpeed's converter makes it from DeepSpeed's checkpoint, once, in the same directory. It runs in its own process, so
that its memory is freed when it ends and its time is bounded.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

UNIVERSAL_TAG = "universal"
LONGEST_SECONDS = 3600.0
DONE = b"done"
_STAGING = "converting-"
_LOG = "log"
_LAST_CHARACTERS = 500
# Neither torch nor the converter looks at the check sums that torch writes.
_VERIFY = """
import sys, zipfile
for path in sys.argv[1:]:
    if damaged := zipfile.ZipFile(path).testzip():
        sys.exit(f"{path} is damaged: {damaged}")
"""


class Conversion:
    """Of the checkpoint `directory / tag` to `directory / UNIVERSAL_TAG`, which appears atomically.

    One that an earlier start has left is made again: nobody has looked at its bytes since.
    """

    def __init__(self, directory: Path, tag: str, longest_seconds: float = LONGEST_SECONDS) -> None:
        self._directory, self._tag = directory, tag
        self._remaining = longest_seconds
        self._staging: Path | None = None
        self._commands: list[list[str]] = []
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Conversion":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)

    def progress(self, seconds: float) -> bytes:
        """Nothing while it still runs after `seconds`, DONE, or why it failed. The first call starts it."""
        try:
            if self._process is None:
                self._start()
            return self._wait(seconds)
        except OSError as error:
            return f"{self._directory} cannot be converted for another number of ranks ({error})".encode()

    def _start(self) -> None:
        for left_behind in self._directory.glob(f"{_STAGING}*"):
            shutil.rmtree(left_behind)
        self._staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=self._directory))
        # Relative paths: the converter reads them as patterns too.
        shards = sorted(str(path.relative_to(self._directory)) for path in (self._directory / self._tag).glob("*.pt"))
        target = f"{self._staging.name}/{UNIVERSAL_TAG}"
        folders = ["--input_folder", self._tag, "--output_folder", target]
        self._commands = [
            ["-c", _VERIFY, *shards],
            ["-m", "deepspeed.checkpoint.ds_to_universal", *folders, "--inject_missing_state"],
        ]
        self._process = self._run(self._commands.pop(0))

    def _run(self, command: list[str]) -> subprocess.Popen[bytes]:
        assert self._staging is not None
        with (self._staging / _LOG).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", *command],
                cwd=self._directory,
                env={**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _wait(self, seconds: float) -> bytes:
        assert self._process is not None
        assert self._staging is not None
        patience = min(seconds, self._remaining)
        started = time.monotonic()
        try:
            code = self._process.wait(patience)
        except subprocess.TimeoutExpired:
            code = None
        self._remaining -= time.monotonic() - started
        if self._remaining <= 0:
            return self._failure("it took too long")
        if code is None:
            return b""
        if code != 0:
            return self._failure(f"exit status {code}")
        if self._commands:
            self._process = self._run(self._commands.pop(0))
            return b""
        final = self._directory / UNIVERSAL_TAG
        if final.exists():
            shutil.rmtree(final)
        (self._staging / UNIVERSAL_TAG).rename(final)
        return DONE

    def _failure(self, reason: str) -> bytes:
        assert self._staging is not None
        said = (self._staging / _LOG).read_text(encoding="utf-8", errors="replace").strip()[-_LAST_CHARACTERS:]
        source = self._directory / self._tag
        return f"{source} cannot be converted for another number of ranks ({reason}): ...{said}".encode()
