"""python -m services.reward --config FILE [--set section.key=value]"""

import asyncio
import os
import socket
import sys

import grpc
import redis
from trivet.v1 import reward_pb2, reward_pb2_grpc

from services.common.config import Config, ConfigError
from services.common.errors import Outage, TrivetError, Unreachable, one_sentence
from services.common.exit_codes import CONFIGURATION, FAILED, FINISHED
from services.common.logs import configure_logs, get_logger
from services.common.serving.arguments import parse_service_arguments, report_end, starting
from services.common.serving.exposition import EXPOSITION
from services.common.serving.server import ServiceServer
from services.common.serving.signals import ending_signals
from services.common.transport.client import connect
from services.common.transport.consumer import Consumer
from services.common.transport.outages import Outages
from services.common.transport.streams import RunStreams
from services.reward.isolation.containment import Containment, protect_service
from services.reward.isolation.pool import ScorerPool
from services.reward.score import GroupScorer
from services.reward.service import RewardServicer
from services.reward.stats import RewardStats

STOP_SECONDS = 4.5
# Of those, for groups in work.
GRACE_SECONDS = 2.0
log = get_logger(__name__)


class RewardProcess:
    """Raises ConfigError for an unknown scorer and without a Redis address."""

    def __init__(self, config: Config) -> None:
        self._config, reward = config, config.reward
        self.reward_id = f"reward-{socket.gethostname()}-{os.getpid()}"
        self._client = connect(config.redis)
        with starting():
            self._pool = ScorerPool(
                reward.scorers,
                workers=reward.workers,
                timeout_seconds=reward.timeout_seconds,
                containment=Containment.of(reward),
            )
        stats = RewardStats()
        self._scorer = GroupScorer(reward, self._pool, stats, self.reward_id)
        self._servicer = RewardServicer(
            self._scorer,
            stats,
            reward_id=self.reward_id,
            scorers=self._pool.labels,
            concurrent_groups=reward.concurrent_groups,
        )
        self._server = ServiceServer(
            reward.server,
            grpc_name=reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name,
            register=self._register,
            ready=lambda: self._not_ready or self._outages.problem,
        )
        # After as long without a group the trainer ends the run, too.
        self._outages = Outages(config.trainer.batch_timeout_seconds, (Outage, Unreachable))
        self._not_ready: str | None = "scorers are loading"

    async def run(self, stop: asyncio.Event) -> None:
        with starting():
            await self._pool.start()
        try:
            await self._server.start()
            log.info("serving", grpc_port=self._server.grpc_port, http_port=self._server.http_port)
            try:
                await self._consume(stop)
            finally:
                self._not_ready = "stopping"
                await self._server.stop()
        finally:
            await self._pool.stop()

    async def _consume(self, stop: asyncio.Event) -> None:
        config = self._config
        self._not_ready = "waiting for Redis"
        # An address that is wrong is not waited for.
        await asyncio.to_thread(self._client.ping)
        streams = RunStreams(self._client, config.run.name, config.redis)
        consumer = Consumer(
            await self._outages.ride_out(lambda: asyncio.to_thread(streams.samples, self.reward_id)),
            await self._outages.ride_out(lambda: asyncio.to_thread(streams.scored, self.reward_id)),
            self._scorer.handle,
            concurrency=config.reward.concurrent_groups,
            outages=self._outages,
            grace_seconds=GRACE_SECONDS,
        )
        self._not_ready = None
        await consumer.run(stop)

    @property
    def ready(self) -> bool:
        return self._not_ready is None

    def _register(self, server: grpc.aio.Server) -> None:
        reward_pb2_grpc.add_RewardServiceServicer_to_server(self._servicer, server)


async def serve(config: Config) -> int:
    """The exit status: FINISHED after a signal, CONFIGURATION for an unusable one, FAILED for what else ends it."""
    stop = asyncio.Event()
    for number in ending_signals():
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        process = RewardProcess(config)
    except ConfigError as error:
        return report_end(CONFIGURATION, str(error))
    running = asyncio.create_task(process.run(stop))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not running.done():
        log.info("stopping")
        if not process.ready:
            running.cancel()
        await asyncio.wait({running}, timeout=STOP_SECONDS)
    if not running.done() or running.cancelled():
        log.warning("stopped_early", done=running.done())
        return FINISHED
    try:
        running.result()
    except ConfigError as error:
        return report_end(CONFIGURATION, str(error))
    except (TrivetError, OSError, redis.RedisError) as error:
        return report_end(FAILED, one_sentence(error))
    return FINISHED


def main() -> None:
    protect_service()
    config = parse_service_arguments("reward")
    configure_logs("reward", config.run.name)
    EXPOSITION.configure("reward", config.run.name)
    # The runner is not closed and sys.exit not called: both would wait for every thread, and one may be waiting
    # for a Redis that does not answer. Scorer processes end with this one.
    status = asyncio.Runner().run(serve(config))
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
