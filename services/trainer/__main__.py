"""python -m services.trainer --config FILE [--set section.key=value]; under torchrun for several ranks."""

import os
import signal
import sys
from collections.abc import Callable

import redis
from trivet.v1 import trainer_pb2, trainer_pb2_grpc

from services.common.config import Config, ConfigError
from services.common.errors import InvalidData, TrivetError
from services.common.logs import configure_logs, get_logger
from services.common.records import Records
from services.common.redis_client import connect
from services.common.server import BackgroundServer, ServiceServer
from services.common.service_main import parse_service_arguments
from services.common.weights import WeightFeed
from services.trainer.checkpoint import Checkpoints
from services.trainer.conductor import Conductor
from services.trainer.data import load_prompts
from services.trainer.engine import TrainEngine
from services.trainer.groups import training_samples
from services.trainer.intake import Arrival
from services.trainer.loop import TrainingLoop
from services.trainer.publication import Publisher
from services.trainer.reference import Reference, load_reference
from services.trainer.service import TrainerServicer
from services.trainer.status import Controls, Status
from services.trainer.update import Updater, build_objective

EXIT_FINISHED, EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED = 0, 1, 2, 3

log = get_logger(__name__)


def main() -> None:
    config = parse_service_arguments("trainer")
    configure_logs("trainer", config.run.name)
    try:
        # Nothing is worth starting for with an objective that does not exist.
        build_objective(config)
        finished = _run(config)
    except (ConfigError, InvalidData, ValueError) as error:
        log.error("refused", reason=str(error))
        print(error, file=sys.stderr)  # noqa: T201
        _leave(EXIT_USAGE)
    except (TrivetError, redis.RedisError, OSError) as error:
        log.error("failed", reason=f"{type(error).__name__}: {error}")
        _leave(EXIT_FAILED)
    _leave(EXIT_FINISHED if finished else EXIT_STOPPED)


def _run(config: Config) -> bool:
    from services.trainer.deepspeed_engine import open_engine

    controls = Controls()
    _obey_signals(controls)
    engine = open_engine(config)
    reference = _reference(config, engine)
    checkpoints = Checkpoints(config.run.path / "checkpoints", config.trainer.keep_checkpoints)
    model = model_identity(config.model.path)
    updater = Updater(config, engine, reference)
    try:
        if engine.rank != 0:
            loop = TrainingLoop(
                config, engine, updater, checkpoints, model=model, conductor=None, publisher=None, records=None
            )
            return loop.run()
        return _conduct(config, engine, updater, checkpoints, model, controls)
    finally:
        engine.close()


def _conduct(
    config: Config, engine: TrainEngine, updater: Updater, checkpoints: Checkpoints, model: str, controls: Controls
) -> bool:
    """Rank 0: the same loop, with a server beside it and Redis behind it."""
    client = connect(config.redis)
    status = Status(config.run.name, config.trainer.steps)
    server = BackgroundServer(
        lambda: ServiceServer(
            config.trainer.server,
            grpc_name=trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name,
            register=lambda grpc_server: trainer_pb2_grpc.add_TrainerServiceServicer_to_server(
                TrainerServicer(status, controls, checkpoints), grpc_server
            ),
            ready=lambda: status.not_ready,
        )
    )
    started = server.start()
    log.info("serving", grpc_port=started.grpc_port, http_port=started.http_port)
    try:
        from transformers import AutoTokenizer

        data = load_prompts(config.data, AutoTokenizer.from_pretrained(config.model.path), config.run.seed)
        if data.dropped:
            log.warning("rows left out: too long, or held out for validation", rows=data.dropped)
        rounds = config.algorithm.dynamic_sampling_rounds if build_objective(config).algorithm.dynamic_sampling else 0
        conductor = Conductor(config, data, client, status, controls, _replay_check(config, engine), rounds)
        loop = TrainingLoop(
            config,
            engine,
            updater,
            checkpoints,
            model=model,
            conductor=conductor,
            publisher=Publisher(
                config.run.path / "weights", WeightFeed(client, config.run.name), config.trainer.keep_weights
            ),
            records=Records(config.run.path),
        )
        finished = loop.run()
        status.state = trainer_pb2.TRAINER_STATE_FINISHED
        return finished
    except BaseException:
        status.state = trainer_pb2.TRAINER_STATE_FAILED
        raise
    finally:
        server.stop()


def _replay_check(config: Config, engine: TrainEngine) -> Callable[[Arrival], None]:
    """An arrival is checked by the code that later trains on it."""

    def check(arrival: Arrival) -> None:
        nothing = [0.0] * len(arrival.replays)
        training_samples(
            arrival.scored,
            arrival.replays,
            engine.facts,
            rewards=nothing,
            advantages=nothing,
            candidates_expected=config.sampling.truncates,
        )

    return check


def _reference(config: Config, engine: TrainEngine) -> Reference | None:
    if not config.rl_stability.needs_reference:
        return None
    return load_reference(
        config.model.path,
        dtype=config.model.dtype,
        device=engine.device,
        keep_routing=config.rl_stability.consistency.keep_routing,
    )


def model_identity(path: str) -> str:
    """A digest of the architecture: what a checkpoint must share with the model that it is loaded into."""
    import json

    import xxhash
    from transformers import AutoConfig

    described = AutoConfig.from_pretrained(path).to_dict()
    for volatile in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        described.pop(volatile, None)
    return xxhash.xxh3_64_hexdigest(json.dumps(described, sort_keys=True, default=str).encode())


def _obey_signals(controls: Controls) -> None:
    """Only rank 0 decides when to stop; the others are told, so that they leave together."""

    def stop(*_: object) -> None:
        controls.stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of libraries must not keep a finished trainer alive.
    os._exit(code)


if __name__ == "__main__":
    main()
