"""Programs that start at once: what they import is imported once, and each start is a fork of what did.

python -m tests.support.warm_process MODULE...: for each line of JSON, a module and its arguments, runs it as
`python -m` would and answers with its status and what it said.
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


class WarmProcess:
    def __init__(self, *modules: str) -> None:
        """`modules` are what is to be run, and what that imports as it is run."""
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm_process", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "WarmProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._server.kill()
        self._server.communicate()

    def run(self, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Its status is that of a signal after SECONDS."""
        command = [module, *arguments]
        print(json.dumps(command), file=self._server.stdin, flush=True)
        return subprocess.CompletedProcess(command, *json.loads(self._server.stdout.readline()))


def serve(*modules: str) -> None:
    for module in modules:
        importlib.import_module(main_of(module))
    for line in sys.stdin:
        module, *arguments = json.loads(line)
        with ExitStack() as files:
            said = [files.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
            if (child := os.fork()) == 0:
                for number, file in enumerate(said, 1):
                    os.dup2(file.fileno(), number)
                signal.alarm(SECONDS)
                # It is run under another name.
                sys.modules.pop(main_of(module), None)
                sys.argv[1:] = arguments
                runpy.run_module(module, run_name="__main__", alter_sys=True)
                sys.exit()
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            for file in said:
                file.seek(0)
            sys.stdout.write(json.dumps([status, *(file.read().decode() for file in said)]) + "\n")
            sys.stdout.flush()


def main_of(module: str) -> str:
    is_program = find_spec(module).submodule_search_locations and find_spec(f"{module}.__main__")
    return f"{module}.__main__" if is_program else module


if __name__ == "__main__":
    serve(*sys.argv[1:])
