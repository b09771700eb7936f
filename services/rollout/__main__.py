"""python -m services.rollout --config FILE [--set section.key=value]: one rollout against the run's Redis."""

import asyncio
import os
import socket
import sys
import uuid
import zlib
from typing import Any

import grpc
from redis.exceptions import RedisError
from trivet.v1 import rollout_pb2_grpc

from services.common.config import Config, ConfigError
from services.common.data.model_path import check_model_path
from services.common.errors import Outage, TrivetError, Unreachable, one_sentence
from services.common.exit_codes import CONFIGURATION, FAILED, FINISHED
from services.common.logs import configure_logs, get_logger
from services.common.run_files.lineage import code_version, config_version
from services.common.serving.arguments import parse_service_arguments, report_end, starting
from services.common.serving.exposition import EXPOSITION
from services.common.serving.server import ServiceServer
from services.common.serving.signals import ending_signals
from services.common.transport.blobs import open_blobs
from services.common.transport.client import connect
from services.common.transport.consumer import Consumer
from services.common.transport.outages import Outages
from services.common.transport.rollout_registry import RolloutRegistry
from services.common.transport.streams import RunStreams
from services.common.transport.weight_feed import WeightFeed
from services.rollout.engine.protocol import Engine
from services.rollout.groups.handler import PromptHandler
from services.rollout.groups.sampler import GroupSampler
from services.rollout.service import GRPC_NAME, RolloutServicer
from services.rollout.vllm_engine.environment import set_defaults
from services.rollout.weights.follower import WeightFollower
from services.rollout.weights.registration import Registration, reachable_address

# With the shutdown of engine and servers after it, a stop stays within 5 seconds.
GRACE_SECONDS = 1.5

log = get_logger(__name__)


def main() -> int:
    config = parse_service_arguments("rollout")
    configure_logs("rollout", config.run.name)
    EXPOSITION.configure("rollout", config.run.name)
    rollout_id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    try:
        with starting():
            check_model_path(config.model.path, "model.path")
        client = connect(config.redis)
        client.ping()
        set_defaults()
        # Only now: vllm reads the environment as it is imported.
        from services.rollout.vllm_engine.engine import VllmEngine

        # Rollouts of one run must not draw the same samples.
        engine = VllmEngine(config, seed=zlib.crc32(f"{config.run.seed}/{rollout_id}".encode()) >> 1)
        # After as long without a group the trainer ends the run, too.
        outages = Outages(config.trainer.batch_timeout_seconds, (Outage, Unreachable))
        rollout = outages.ride_out_blocking(lambda: Rollout(config, rollout_id, client, engine, outages))
        # Not asyncio.run, which waits for every thread: one may be waiting for a Redis that does not answer.
        return asyncio.Runner().run(rollout.serve())
    except ConfigError as error:
        return report_end(CONFIGURATION, str(error))
    except (TrivetError, RedisError, OSError) as error:
        return report_end(FAILED, one_sentence(error))


class Rollout:
    """The parts of the service, wired."""

    def __init__(self, config: Config, rollout_id: str, client: Any, engine: Engine, outages: Outages) -> None:
        self._config, self._engine, self._id, self._client = config, engine, rollout_id, client
        self._outages = outages
        streams = RunStreams(client, config.run.name, config.redis)
        self._sampler = GroupSampler(engine, rollout_id=rollout_id, code=code_version(), config=config_version(config))
        self._follower = WeightFollower(
            engine,
            WeightFeed(client, config.run.name),
            timeout_seconds=config.rollout.load_timeout_seconds,
            directory=config.run.path / "weights",
        )
        handler = PromptHandler(
            self._sampler, self._follower, open_blobs(config.blobs, client, config.run.name), outages
        )
        self._consumer = Consumer(
            streams.prompts(rollout_id),
            streams.samples(rollout_id),
            handler,
            concurrency=config.rollout.concurrent_groups,
            outages=outages,
            grace_seconds=GRACE_SECONDS,
            ready=handler.is_ready,
        )
        self._server = ServiceServer(
            config.rollout.server,
            grpc_name=GRPC_NAME,
            register=self._register,
            ready=lambda: engine.problem or self._follower.problem or self._outages.problem,
        )
        self._stop = asyncio.Event()

    async def serve(self) -> int:
        """Runs until a signal (FINISHED) or until the engine gives up (FAILED). Raises what a part could not handle."""
        for number in ending_signals():
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        await self._server.start()
        log.info("serving", rollout=self._id, grpc_port=self._server.grpc_port, http_port=self._server.http_port)
        try:
            return await self._work()
        finally:
            await asyncio.gather(self._engine.close(), self._server.stop())
            tally = self._sampler.tally
            log.info("stopped", groups=tally.groups, samples=tally.samples, tokens=tally.tokens)

    async def _work(self) -> int:
        stopped = asyncio.create_task(self._stop.wait())
        jobs: list[asyncio.Task[Any]] = [asyncio.create_task(self._start())]
        try:
            await asyncio.wait([stopped, *jobs], return_when=asyncio.FIRST_COMPLETED)
            if stopped.done():
                return FINISHED
            jobs.pop().result()
            log.info("sampling", version=self._engine.weights.version)
            gave_up = asyncio.create_task(self._engine.wait_gave_up())
            jobs = [gave_up, asyncio.create_task(self._follower.run(self._outages))]
            if self._config.weights.transfer != "disk":
                jobs.append(asyncio.create_task(self._stay_registered()))
            consuming = asyncio.create_task(self._consumer.run(self._stop))
            done, _ = await asyncio.wait([stopped, consuming, *jobs], return_when=asyncio.FIRST_COMPLETED)
            self._stop.set()
            await asyncio.wait([consuming])
            for job in [*done, consuming]:
                job.result()
            if gave_up in done:
                return report_end(FAILED, f"the engine gave up: {self._engine.problem}")
            return FINISHED
        finally:
            for job in [stopped, *jobs]:
                job.cancel()
            await asyncio.gather(stopped, *jobs, return_exceptions=True)

    async def _start(self) -> None:
        await self._engine.launch()
        await self._outages.ride_out(self._follower.catch_up)

    async def _stay_registered(self) -> None:
        server, port = self._config.rollout.server, self._server.grpc_port
        address = await self._outages.ride_out(lambda: asyncio.to_thread(reachable_address, server, port, self._client))
        log.info("registered", address=address)
        registration = Registration(
            RolloutRegistry(self._client, self._config.run.name),
            self._engine,
            rollout_id=self._id,
            address=address,
            outages=self._outages,
        )
        await registration.run()

    def _register(self, server: grpc.aio.Server) -> None:
        servicer = RolloutServicer(
            self._sampler,
            self._follower,
            self._consumer,
            limit=self._config.rollout.concurrent_groups,
            transfer=self._config.weights.transfer,
        )
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is closed by now; to take torch and vllm down module by module would last for seconds.
    os._exit(status)
