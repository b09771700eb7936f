"""A program that starts at once: what it imports is imported once, and each start of it is a fork.

python -m tests.support.warm_module MODULE MORE...: for each line of arguments, as JSON, runs MODULE as `python -m`
would and answers with its status and what it said.
"""

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from types import TracebackType

SECONDS = 120


class WarmModule:
    def __init__(self, module: str, *imported_later: str) -> None:
        """`imported_later` is what the module imports as it is run."""
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm_module", module, *imported_later],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "WarmModule":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._server.kill()
        self._server.communicate()

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Its status is that of a signal after SECONDS."""
        print(json.dumps(arguments), file=self._server.stdin, flush=True)
        return subprocess.CompletedProcess(arguments, *json.loads(self._server.stdout.readline()))


def serve(module: str, *imported_later: str) -> None:
    main = f"{module}.__main__" if find_spec(module).submodule_search_locations else module
    for name in (main, *imported_later):
        importlib.import_module(name)
    # It is run under another name.
    del sys.modules[main]
    for line in sys.stdin:
        with ExitStack() as files:
            said = [files.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
            if (child := os.fork()) == 0:
                for number, file in enumerate(said, 1):
                    os.dup2(file.fileno(), number)
                signal.alarm(SECONDS)
                sys.argv[1:] = json.loads(line)
                runpy.run_module(module, run_name="__main__", alter_sys=True)
                sys.exit()
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            for file in said:
                file.seek(0)
            sys.stdout.write(json.dumps([status, *(file.read().decode() for file in said)]) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    serve(*sys.argv[1:])
