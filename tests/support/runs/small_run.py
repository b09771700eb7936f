"""`trivet up` with processes of a few lines in place of the services, which SMALL_SERVICE says how to behave.

"loading": nothing catches a signal yet. "training": the trainer leaves as one that has saved does. "stuck": nothing
that is asked ends them. "failing": they end at once. Each has a child, as vLLM has, and creates <its name>.ready in
SMALL_DIRECTORY when it is as far as that.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

MODE, DIRECTORY = "SMALL_SERVICE", "SMALL_DIRECTORY"
STOPPED = 3


def serve(service: str) -> None:
    directory, mode = Path(os.environ[DIRECTORY]), os.environ[MODE]
    if mode == "failing":
        sys.exit("RuntimeError: it fails")
    with subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"]):
        if mode == "stuck":
            signal.signal(signal.SIGTERM, lambda *_: (directory / f"{service}.asked").touch())
        if mode == "training" and service == "trainer":
            signal.signal(signal.SIGTERM, lambda *_: os._exit(STOPPED))
        (directory / f"{service}.ready").touch()
        threading.Event().wait()


def fork_context() -> ForkServerContext:
    """Its processes have the command line's modules already: to import them takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "services.cli.app"])
    return context


def up(output: Connection, file: Path, environment: dict[str, str], nohup: bool) -> None:
    """`output` is what it prints on; it leads a session of its own."""
    from services.cli.app import app
    from services.cli.up import command
    from services.cli.up.supervisor import Supervisor

    os.setsid()
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    output.close()
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    Supervisor._launcher = lambda _, service: [sys.executable, __file__, service]
    # There is no model.
    command.refuse_problems = lambda *_: None
    app(["up", str(file)])


if __name__ == "__main__":
    serve(sys.argv[1])
