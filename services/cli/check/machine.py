"""Whether this machine has what the run asks of it: GPUs, ports, Redis and disk."""

import math
from collections.abc import Iterator
from pathlib import Path
from shutil import disk_usage
from typing import NamedTuple, cast

import redis
from safetensors import SafetensorError, safe_open

from services.common.config import Config, ServerConfig
from services.common.config.addresses import host_and_port, listen
from services.common.run_files.check_report import CheckReport
from services.common.secrets import without_secrets

REDIS_SECONDS = 5.0
OLDEST_REDIS = 7
# float32 masters and both moments of the optimizer.
OPTIMIZER_BYTES = 12


def machine_report(config: Config, *, starts: bool) -> CheckReport:
    """`starts`: for `trivet up`, which waits for a Redis that does not answer and takes free ports for gRPC."""
    findings = [*_devices(config), *_ports(config, ("http_port",)), *_disk(config)]
    doubts = list(_ports(config, ("grpc_port",)))
    if config.redis.url is not None and config.data.preferences is None:
        answer = _redis(config.redis.url)
        (doubts if starts and answer.absent else findings).extend(answer.problems)
    return CheckReport(findings=tuple(findings), doubts=tuple(doubts))


def _devices(config: Config) -> Iterator[str]:
    """Ranks of the trainer, and the workers of one rollout, have a GPU each; a rollout may share GPUs with others."""
    trainer, engine = config.trainer, config.rollout.engine
    sizes = {
        name: engine[name]
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        if engine.get(name, 1) != 1
    }
    if trainer.device != "cuda" and trainer.processes == 1 and not sizes:
        return
    import torch

    present = torch.cuda.device_count()
    here = f"{present} GPU{'s' * (present != 1)}"
    if trainer.device == "cuda" and not present:
        yield "trainer.device is cuda, expected cpu or auto: torch sees no GPU on this machine"
    elif trainer.device != "cpu" and 0 < present < trainer.processes:
        yield f"trainer.processes is {trainer.processes}, expected at most {present}: this machine has {here}"
    if config.data.preferences is None and 0 < present < math.prod(sizes.values()):
        asked = " × ".join(f"rollout.engine.{name} {size}" for name, size in sizes.items())
        yield f"{asked} is {math.prod(sizes.values())}, expected at most {present}: this machine has {here}"


def _ports(config: Config, names: tuple[str, ...]) -> Iterator[str]:
    services = ["trainer"] if config.data.preferences is not None else ["rollout", "reward", "trainer"]
    owners: dict[int, str] = {}
    for service in services:
        section = getattr(config, service)
        server: ServerConfig = section.server
        for name in names:
            key, port = f"{service}.server.{name}", getattr(server, name)
            if port == 0:
                continue
            replicas = getattr(section, "replicas", 1)
            if port in owners:
                yield f"{key} is {port}, expected another port, or 0 for any: {owners[port]} has that one"
            elif name == "http_port" and replicas > 1:
                yield f"{key} is {port}, expected 0 (any) with {service}.replicas {replicas}: only one could have it"
            else:
                yield from _taken(key, server.host, port)
            owners[port] = key


def _taken(key: str, host: str, port: int) -> Iterator[str]:
    try:
        opened = listen(host, port)
    except OSError as error:
        address, reason = host_and_port(host, port), error.strerror or error
        yield f"{key} is {port}, expected a free port, or 0 for any: {address} cannot be listened on ({reason})"
        return
    for each in opened:
        each.close()


class _Answer(NamedTuple):
    problems: tuple[str, ...]
    # Nobody answers, which may change.
    absent: bool = False


def _redis(url: str) -> _Answer:
    here = f"redis.url is {without_secrets(url)}, expected Redis {OLDEST_REDIS} or newer, or Valkey"
    try:
        with redis.Redis.from_url(url, socket_timeout=REDIS_SECONDS, socket_connect_timeout=REDIS_SECONDS) as client:
            info = cast(dict[str, object], client.info())
    except redis.exceptions.AuthenticationError as error:
        return _Answer((f"{here}: it refuses the user or the password ({error})",))
    except redis.exceptions.ConnectionError as error:
        return _Answer((f"{here}: nobody answers ({type(error).__name__})",), absent=True)
    except redis.exceptions.RedisError as error:
        return _Answer((f"{here}: INFO is answered by {type(error).__name__} ({error})",))
    problems = []
    version, policy = str(info["redis_version"]), info.get("maxmemory_policy", "noeviction")
    if int(version.partition(".")[0]) < OLDEST_REDIS:
        problems.append(f"{here}: it is version {version}")
    if policy != "noeviction":
        problems.append(
            f"redis.url is {without_secrets(url)}, whose maxmemory-policy is {policy}, expected noeviction: "
            "it would drop samples"
        )
    return _Answer(tuple(problems))


def _disk(config: Config) -> Iterator[str]:
    parameters = _parameters(Path(config.model.path))
    weights = parameters * (2 if config.model.dtype == "bfloat16" else 4)
    trainer = config.trainer
    # At the least: a resumed run has a part of it already, and ZeRO-1 and 2 keep the weights once more.
    saves = min(trainer.keep_checkpoints + 1, math.ceil(trainer.steps / trainer.checkpoint_every))
    recorded = trainer.recording.every and min(
        trainer.recording.keep, math.ceil(trainer.steps / trainer.recording.every)
    )
    published = 0 if config.data.preferences is not None else min(trainer.keep_weights, trainer.steps)
    checkpoint = OPTIMIZER_BYTES * parameters + weights
    needed = (saves + recorded) * checkpoint + published * weights
    directory = config.run.path.absolute()
    free = disk_usage(next(each for each in (directory, *directory.parents) if each.is_dir())).free
    own = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    if needed > free + own:
        kept = [f"{saves} checkpoints of {_gigabytes(checkpoint)} (trainer.keep_checkpoints)"]
        if recorded:
            kept.append(f"{recorded} recorded steps as large (trainer.recording.keep)")
        if published:
            kept.append(f"{published} policy versions of {_gigabytes(weights)} (trainer.keep_weights)")
        yield (
            f"run.directory is {str(config.run.directory)!r}, where {_gigabytes(free + own)} are free, expected at "
            f"least {_gigabytes(needed)} for {', '.join(kept)}"
        )


def _parameters(model: Path) -> int:
    """Of the checkpoint's safetensors; 0 where there are none to read."""
    count = 0
    for file in model.glob("*.safetensors"):
        try:
            with safe_open(file, "np") as tensors:
                count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
        except (SafetensorError, OSError):
            # The check of the model says what is wrong with it.
            return 0
    return count


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
