"""The train engine on DeepSpeed ZeRO. Only this module and zero_sharding import deepspeed."""

import os
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from jaxtyping import Float
from torch import Tensor

from services.common.config import Config
from services.common.errors import InvalidData
from services.trainer.batch.model_facts import ModelFacts
from services.trainer.batch.packing import PackedBatch
from services.trainer.engine import identity, zero_state
from services.trainer.engine.convert import DONE, UNIVERSAL_TAG, Conversion
from services.trainer.engine.deepspeed_config import deepspeed_config
from services.trainer.engine.optimizer import build_optimizer, parameter_groups, set_learning_rates
from services.trainer.engine.plain_engine import plain_device
from services.trainer.engine.protocol import PolicyOutput, Reduction, StepResult
from services.trainer.engine.zero_sharding import ZeroSharding, keeping_buffers
from services.trainer.export.policy_files import copy_tokenizer, separate_tensors, stream_model, write_model
from services.trainer.export.tensors import WeightSource, whole_tensors
from services.trainer.model.load import model_directory
from services.trainer.model.policy import Policy, configured_policy

DEEPSPEED_TAG = "deepspeed"
MIN_COLLECTIVE_SECONDS = 600.0
PROGRESS_SECONDS = 30.0
_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


def open_engine(config: Config) -> "DeepSpeedEngine":
    """Joins the process group (torchrun's variables, else alone), loads the policy and shards it.

    Raises InvalidData for a model that cannot be trained exactly, ValueError for an unknown algorithm.
    """
    joined = not dist.is_initialized()
    device = join_process_group(config)
    sharding = ZeroSharding(config, device) if config.trainer.zero_stage == 3 else None
    policy = configured_policy(config, config.model.path, device, sharding)
    source = model_directory(config.model.path)
    return DeepSpeedEngine(config, policy, device, source=source, sharding=sharding, leaves_group=joined)


class DeepSpeedEngine:
    def __init__(
        self,
        config: Config,
        policy: Policy,
        device: torch.device,
        *,
        source: Path,
        sharding: ZeroSharding | None,
        leaves_group: bool,
    ) -> None:
        """`source` is the directory whose tokenizer goes into exports; `leaves_group` makes `close` end the group.

        `sharding` is what has sharded `policy`.
        """
        import deepspeed

        self._config = config
        self._policy = policy
        self._device = device
        self._source = source
        self._sharding = sharding
        self._leaves_group = leaves_group
        self._identity = identity.Identity.of(policy, config, dist.get_world_size())
        self._total_steps = config.trainer.steps * config.trainer.minibatches * config.trainer.epochs
        self._steps_applied = 0
        groups = parameter_groups(policy, config)
        self._peaks = [group.peak for group in groups]
        with keeping_buffers(policy):
            self._engine, self._optimizer, _, _ = deepspeed.initialize(
                model=policy,
                optimizer=build_optimizer(groups, config),
                config=deepspeed_config(config),
                dist_init_required=False,
            )

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def sharding(self) -> ZeroSharding | None:
        return self._sharding

    @property
    def facts(self) -> ModelFacts:
        return self._policy.facts

    @property
    def steps_applied(self) -> int:
        return self._steps_applied

    def logprobs(self, batch: PackedBatch, *, keep_routing: bool = True) -> PolicyOutput:
        with torch.no_grad():
            return self.forward(batch, keep_routing=keep_routing)

    def forward(self, batch: PackedBatch, *, keep_routing: bool = True, entropy_gradient: bool = False) -> PolicyOutput:
        logprobs, entropies, *values = self._engine(
            batch.to(self._device), keep_routing=keep_routing, entropy_gradient=entropy_gradient
        )
        return PolicyOutput(logprobs, entropies, self._policy.agreement, *values)

    def backward(self, loss: Float[Tensor, ""], *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        try:
            # DeepSpeed averages gradients over ranks; the losses of all ranks are to sum.
            self._engine.backward(loss * self.world_size, scale_wrt_gas=False)
        finally:
            self._policy.close_routing()

    def step(self) -> StepResult:
        rate = set_learning_rates(
            self._optimizer.param_groups, self._peaks, self._config, self._steps_applied, self._total_steps
        )
        self._engine.step()
        applied = bool(self._engine.was_step_applied())
        norm = self._engine.get_global_grad_norm()
        self._steps_applied += applied
        return StepResult(applied, float(norm) if norm is not None else float("inf"), rate)

    def finite(self) -> bool:
        found = zero_state.all_finite(zero_state.fragments(self._policy, self._engine.optimizer))
        return bool(self.all_reduce(torch.tensor(float(found)), "min"))

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._engine.save_checkpoint(str(directory), tag=DEEPSPEED_TAG, save_latest=False)
        identity.write_random_state(directory, self.rank)
        digest = self.state_digest()
        if self.rank == 0:
            identity.write_identity(directory, self._identity, self._steps_applied, digest)
        self.barrier()

    def load(self, directory: Path) -> None:
        saved = identity.check_identity(directory, self._identity)
        identity.check_shards(directory / DEEPSPEED_TAG, saved)
        tag = DEEPSPEED_TAG
        if not saved.is_cut_as(self._identity):
            tag = UNIVERSAL_TAG
            self._make_universal(directory)
        self._load_state(directory, tag)
        identity.restore_random_state(directory, self.rank, saved.world_size)
        self._steps_applied = saved.steps_applied
        if tag == DEEPSPEED_TAG and saved.state_digest not in {None, self.state_digest()}:
            raise InvalidData("checkpoint_corrupt", f"{directory / tag} holds other values than those that were saved")
        self.barrier()

    def state_digest(self) -> str:
        mine = zero_state.digest(zero_state.fragments(self._policy, self._engine.optimizer))
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self._device)
        ranks = [torch.empty_like(sent) for _ in range(self.world_size)]
        dist.all_gather(ranks, sent)
        gathered = torch.cat(ranks).cpu().numpy().tobytes()
        return xxhash.xxh3_128_hexdigest(gathered + self._steps_applied.to_bytes(8, "little"))

    def weight_source(self) -> WeightSource:
        return WeightSource(self._policy.model, self._sharding)

    def export(self, directory: Path) -> None:
        model = self._policy.model
        pieces = separate_tensors(model, self._sharding)
        if pieces is None:
            state = self._gather_state()
            if self.rank == 0:
                write_model(model, state, directory)
        elif self.rank == 0:
            stream_model(model, pieces, directory)
        else:
            pieces.gather()
        if self.rank == 0:
            copy_tokenizer(self._source, directory)
        self.barrier()

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        if (data is None) != (self.rank != 0):
            raise ValueError(
                f"rank {self.rank} passed {'nothing' if data is None else 'data'}; only rank 0 passes data"
            )
        size = torch.tensor([len(data or b"")], dtype=torch.int64, device=self._device)
        dist.broadcast(size, src=0)
        content = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        if data:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(content, src=0)
        return content.cpu().numpy().tobytes()

    def all_reduce(self, values: Tensor, operation: Reduction) -> Tensor:
        reduced = values.detach().to(self._device, copy=True)
        dist.all_reduce(reduced, op=_REDUCTIONS[operation])
        return reduced.to(values.device)

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        self._engine.destroy()
        if self._leaves_group:
            dist.destroy_process_group()

    def _make_universal(self, directory: Path) -> None:
        """Rank 0 converts; the others hear from it often enough that their collectives do not time out."""
        conversion = Conversion(directory, DEEPSPEED_TAG) if self.rank == 0 else nullcontext()
        with conversion as running:
            report = b""
            while not report:
                report = self.broadcast_bytes(running.progress(PROGRESS_SECONDS) if running else None)
        if report != DONE:
            raise InvalidData("checkpoint_conversion", report.decode())

    def _load_state(self, directory: Path, tag: str) -> None:
        self._engine._config.load_universal_checkpoint = tag == UNIVERSAL_TAG
        try:
            with zero_state.loading(self._engine.optimizer):
                loaded, _ = self._engine.load_checkpoint(str(directory), tag=tag, load_lr_scheduler_states=False)
        except (torch.OutOfMemoryError, dist.DistError):
            raise
        except (OSError, EOFError, RuntimeError, KeyError, IndexError, ValueError, AssertionError) as error:
            said = f"{type(error).__name__}: {error}"
            raise InvalidData("checkpoint_corrupt", f"{directory / tag} cannot be loaded ({said})") from error
        if loaded is None:
            raise InvalidData("checkpoint_incomplete", f"{directory / tag} has no DeepSpeed state to load")

    def _gather_state(self) -> dict[str, Tensor]:
        """Whole parameters and persistent buffers on the CPU of rank 0; empty elsewhere. Each rank must call it."""
        tensors = whole_tensors(self._policy.model, self._sharding)
        return {name: tensor.to("cpu", copy=True) for name, tensor in tensors if self.rank == 0}


def join_process_group(config: Config) -> torch.device:
    cuda = plain_device(config).type == "cuda"
    # DeepSpeed reads these; torchrun sets the rank's own.
    os.environ["DS_ACCELERATOR"] = "cuda" if cuda else "cpu"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if "RANK" not in os.environ:
        os.environ.update(alone)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    import deepspeed

    if cuda:
        torch.cuda.set_device(device)
    else:
        # Otherwise a shared-memory op is compiled at first use, which takes minutes.
        deepspeed.ops.__compatible_ops__ = {}
    # The other ranks wait in a broadcast for as long as rank 0 may wait for a batch.
    patience = timedelta(seconds=max(MIN_COLLECTIVE_SECONDS, 2 * config.trainer.batch_timeout_seconds))
    if not dist.is_initialized():
        deepspeed.init_distributed("nccl" if cuda else "gloo", timeout=patience, verbose=False)
    return device
