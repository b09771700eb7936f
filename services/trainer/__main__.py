"""python -m services.trainer --config FILE [--set section.key=value]; under torchrun for several ranks."""

import os
from dataclasses import replace

import redis
from trivet.v1 import trainer_pb2, trainer_pb2_grpc

from services.common.config import Config, ConfigError
from services.common.errors import GaveUp, TrivetError, one_sentence
from services.common.exit_codes import CONFIGURATION, FAILED, FINISHED, GAVE_UP, STOPPED
from services.common.logs import configure_logs, get_logger
from services.common.run_files.run_log import RunLog
from services.common.serving.arguments import leave, parse_service_arguments, report_end, starting
from services.common.serving.exposition import EXPOSITION
from services.common.serving.server import BackgroundServer, ServiceServer
from services.common.serving.signals import die_with_parent, on_signals
from services.common.transport.client import connect
from services.common.transport.outages import Outages
from services.trainer.checkpoint.directory import Checkpoints
from services.trainer.data.model_files import check_model, model_paths, open_tokenizer, unstopped_turn
from services.trainer.data.preferences import PreferenceData, load_preferences
from services.trainer.data.prompts import PromptData, load_prompts
from services.trainer.loop import Machinery, RankZero, TrainingLoop
from services.trainer.model.load import weights_fingerprint
from services.trainer.recording.recorder import Recorder
from services.trainer.service import TrainerServicer
from services.trainer.steps.deaths import Deaths
from services.trainer.steps.lease import Lease
from services.trainer.steps.observe import observe_start
from services.trainer.steps.orchestrator import Orchestrator
from services.trainer.steps.pair_feed import PairFeed
from services.trainer.steps.status import Controls, Status
from services.trainer.update.algorithm import configured_algorithm
from services.trainer.update.open import open_updater
from services.trainer.update.reference import open_reference
from services.trainer.weights.publish import Publisher, Release
from services.trainer.weights.setup import open_source, open_transfer

log = get_logger(__name__)


def main() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun starts ranks in sessions of their own: they would outlive it when it is killed.
        die_with_parent()
    config = parse_service_arguments("trainer")
    configure_logs("trainer", config.run.name)
    EXPOSITION.configure("trainer", config.run.name)
    try:
        # Nothing is worth starting for with an objective that does not exist.
        with starting():
            configured_algorithm(config)
        finished = _run(config)
    except ConfigError as error:
        leave(report_end(CONFIGURATION, str(error)))
    except GaveUp as error:
        leave(report_end(GAVE_UP, str(error), code=error.code))
    except (TrivetError, redis.RedisError, OSError, ValueError, RuntimeError) as error:
        unexpected = isinstance(error, (ValueError, RuntimeError))
        leave(report_end(FAILED, one_sentence(error), exc_info=unexpected))
    leave(FINISHED if finished else STOPPED)


def _run(config: Config) -> bool:
    controls = Controls()
    _obey_signals(controls)
    with starting():
        data = _load_data(config)
    # Only now: who gives wrong data need not wait until DeepSpeed is imported.
    from services.trainer.engine.deepspeed_engine import open_engine

    lease = _lease(config, controls)
    with starting():
        engine = open_engine(config)
        machinery = Machinery(
            engine=engine,
            updater=open_updater(config, engine, open_reference(config, engine)),
            checkpoints=Checkpoints(config.run.path / "checkpoints", config.trainer.keep_checkpoints),
            recorder=Recorder(config, engine),
            model=model_identity(config.model.path),
            settings=fixed_settings(config),
            source=open_source(config, engine),
        )
    try:
        if data is None:
            return TrainingLoop(config, machinery, None).run()
        return _rank_zero(config, data, machinery, controls, lease)
    finally:
        if lease is not None:
            lease.close()
        engine.close()


def _lease(config: Config, controls: Controls) -> Lease | None:
    """Rank 0's, taken before a model is loaded needlessly; a run without Redis has none. Raises Unavailable."""
    if config.data.preferences is not None or int(os.environ.get("RANK", "0")) != 0:
        return None
    lease = Lease(connect(config.redis), config.run.name)
    _outages(config).ride_out_blocking(lambda: lease.acquire(controls.stop))
    return lease


def _rank_zero(
    config: Config,
    data: PromptData | PreferenceData,
    machinery: Machinery,
    controls: Controls,
    lease: Lease | None,
) -> bool:
    """Rank 0: the same loop, with a server and, if answers are sampled, a connection to Redis."""
    status = Status(config.run.name, config.trainer.steps)
    observe_start(config, controls)
    server = BackgroundServer(
        lambda: ServiceServer(
            config.trainer.server,
            grpc_name=trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name,
            register=lambda grpc_server: trainer_pb2_grpc.add_TrainerServiceServicer_to_server(
                TrainerServicer(status, controls, machinery.checkpoints), grpc_server
            ),
            ready=lambda: status.not_ready,
        )
    )
    started = server.start()
    log.info("serving", grpc_port=started.grpc_port, http_port=started.http_port)
    try:
        with starting():
            deaths = Deaths(config.run.path / "deaths.json", config.redis.max_deliveries)
            if isinstance(data, PreferenceData):
                rank_zero = _pairs(config, data, status, controls, deaths)
            else:
                rank_zero = replace(_sampled(config, data, machinery, status, controls, deaths), lease=lease)
        try:
            finished = TrainingLoop(config, machinery, rank_zero).run()
        finally:
            if rank_zero.release is not None:
                rank_zero.release.close()
        status.state = trainer_pb2.TRAINER_STATE_FINISHED
        return finished
    except BaseException:
        status.state = trainer_pb2.TRAINER_STATE_FAILED
        raise
    finally:
        server.stop()


def _sampled(
    config: Config, data: PromptData, machinery: Machinery, status: Status, controls: Controls, deaths: Deaths
) -> RankZero:
    client = connect(config.redis)
    rounds = config.algorithm.dynamic_sampling_rounds if configured_algorithm(config).dynamic_sampling else 0
    facts = machinery.engine.facts
    orchestrator = _outages(config).ride_out_blocking(
        lambda: Orchestrator(config, data, client, status, controls, facts, rounds, deaths)
    )
    publisher = Publisher(
        config.run.path / "weights", orchestrator.feed, config.trainer.keep_weights, orchestrator.outages
    )
    transfer = open_transfer(config, client, machinery.source, machinery.engine.device)
    release = Release(publisher, config.weights, transfer)
    return RankZero(orchestrator, RunLog(config.run.path), release, deaths=deaths)


def _outages(config: Config) -> Outages:
    return Outages(config.trainer.batch_timeout_seconds)


def _pairs(config: Config, data: PreferenceData, status: Status, controls: Controls, deaths: Deaths) -> RankZero:
    return RankZero(PairFeed(config, data, status, controls, deaths), RunLog(config.run.path), None, deaths=deaths)


def _load_data(config: Config) -> PromptData | PreferenceData | None:
    """Rank 0's, before any model is loaded: what cannot be used shows at once. None on the other ranks."""
    if os.environ.get("RANK", "0") != "0":
        return None
    for key, path in model_paths(config):
        check_model(path, key)
    tokenizer = open_tokenizer(config.model.path)
    data: PromptData | PreferenceData
    if config.data.preferences is not None:
        data = load_preferences(config, tokenizer)
    else:
        data = load_prompts(config.data, tokenizer, config.run.seed)
        if doubt := unstopped_turn(config, tokenizer):
            log.warning(doubt)
        if data.columns_left_out:
            log.warning("columns that scorers do not get: not JSON", columns=sorted(data.columns_left_out))
    if data.dropped:
        log.warning("rows left out: too long, or held out for validation", rows=data.dropped)
    return data


def fixed_settings(config: Config) -> dict[str, str]:
    """What a resumed run must have in common with its checkpoint; checkpoint.FIXED says why."""
    return {
        "run.seed": str(config.run.seed),
        "data.shuffle": str(config.data.shuffle),
        "model.path": weights_fingerprint(config.model.path),
    }


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
    """Only rank 0 decides when to stop; the others follow, so that they leave together."""
    on_signals(lambda _: controls.stop.set())


if __name__ == "__main__":
    main()
