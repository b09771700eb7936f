"""The worker extension: vLLM loads it by name into its worker process, where it listens to the routers and the sampler.

For model runner V1, without speculation, prefix caching, pipeline parallelism or asynchronous scheduling: each would
break the tie between a forwarded row and its position. `vllm_engine` sees to that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

from services.rollout.capture.captured import CapturedRequest, CapturedRequests, Chunk
from services.rollout.vllm_engine.arguments import CAPTURE_KEY
from services.rollout.vllm_engine.cpu_reload import pack_experts_on_reload, pack_heads
from services.rollout.vllm_engine.cuda_ipc import opened_by_vllm
from services.rollout.vllm_engine.start_failure import keep_first_failure

# vLLM imports this module in each of its processes, once it has set up logging and before it loads the model.
keep_first_failure()


class CaptureExtension:
    """Mixed into vLLM's worker; its methods are called with collective_rpc."""

    rank: int
    model_runner: Any
    model_config: Any
    device: torch.device
    reload_weights: Callable[..., None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def trivet_moe_layers(self) -> list[int]:
        """Layer indices of the model's MoE layers that live in this worker, ascending."""
        return sorted(_moe_layers(self.model_runner.get_model()))

    def trivet_prepare_reload(self) -> None:
        pack_experts_on_reload(self.model_runner.get_model())

    def trivet_reload(self, path: str) -> None:
        self.reload_weights(weights_path=path)
        pack_heads(self.model_runner.get_model())

    def trivet_device(self) -> str:
        """The GPU's UUID, empty on CPUs."""
        return str(torch.cuda.get_device_properties(self.device).uuid) if self.device.type == "cuda" else ""

    def trivet_receive(self, info: dict[str, Any]) -> None:
        """Tensors of a version that comes from the trainer's memory."""
        self.update_weights(opened_by_vllm(info) if "buffer" in info else info)

    def trivet_finish_update(self) -> None:
        self.finish_weight_update()
        pack_heads(self.model_runner.get_model())

    def trivet_start_capture(self, kept: int) -> None:
        """Starts capturing, on the first rank only: the others route and sample identically."""
        if self.rank == 0:
            self.trivet_capture = Capture(self.model_runner, self.model_config.get_num_experts(), kept)

    def trivet_take(self, take: list[str], drop: list[str]) -> list[Chunk | None]:
        if self.rank != 0:
            return []
        self.trivet_capture.requests.drop(drop)
        return self.trivet_capture.requests.take(take)

    def trivet_held(self) -> int:
        """Captured requests in memory."""
        return len(self.trivet_capture.requests) if self.rank == 0 else 0


@dataclass(frozen=True)
class Slot:
    """One request's part of a step: `tokens` rows of the batch, for positions from `start` on."""

    captured: CapturedRequest | None
    start: int
    tokens: int


class Capture:
    def __init__(self, runner: Any, experts: int, kept: int) -> None:
        self.requests = CapturedRequests(kept)
        self._runner = runner
        self._dtype = torch.uint8 if experts <= 256 else torch.uint16
        self._step: dict[int, torch.Tensor] = {}
        self._slots: list[Slot] = []
        self._sample_ids: dict[str, str] = {}
        for layer, module in _moe_layers(runner.get_model()).items():
            if not isinstance(module.router, BaseRouter):
                raise NotImplementedError(f"layer {layer}: router {type(module.router).__name__} cannot be captured")
            module.router.set_capture_fn(partial(self._on_route, layer))
        runner.sampler.topk_topp_sampler.register_forward_hook(self._on_sample)
        self._execute: Callable[..., Any] = runner.execute_model
        runner.execute_model = self._on_execute

    def _on_route(self, layer: int, experts: torch.Tensor) -> None:
        self._step[layer] = experts.to(self._dtype)

    def _on_execute(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        for request_id in scheduler_output.finished_req_ids:
            if sample_id := self._sample_ids.pop(request_id, None):
                self.requests.finish(sample_id)
        self._step, self._slots = {}, []
        result = self._execute(scheduler_output, *args, **kwargs)
        if scheduler_output.total_num_scheduled_tokens:
            # Only now has the runner settled the order of its batch.
            self._slots = self._layout(scheduler_output.num_scheduled_tokens)
            self._keep_rows()
        return result

    def _layout(self, scheduled: dict[str, int]) -> list[Slot]:
        batch = self._runner.input_batch
        return [
            Slot(self._captured(request_id), int(batch.num_computed_tokens_cpu[index]), scheduled[request_id])
            for index, request_id in enumerate(batch.req_ids)
        ]

    def _captured(self, request_id: str) -> CapturedRequest | None:
        if sample_id := self._sample_ids.get(request_id):
            return self.requests.running(sample_id)
        request = self._runner.requests[request_id]
        wanted = (request.sampling_params.extra_args or {}).get(CAPTURE_KEY)
        if wanted is None:
            return None
        captured = CapturedRequest(
            prompt_length=request.num_prompt_tokens,
            positions=request.num_prompt_tokens + request.sampling_params.max_tokens - 1,
            candidates=wanted["candidates"],
        )
        self._sample_ids[request_id] = wanted["id"]
        self.requests.start(wanted["id"], captured)
        return captured

    def _keep_rows(self) -> None:
        if not self._step or not any(slot.captured for slot in self._slots):
            return
        tokens = sum(slot.tokens for slot in self._slots)
        layers = [self._step[layer][:tokens] for layer in sorted(self._step)]
        rows = torch.stack(layers, dim=1).cpu().numpy()
        first = 0
        for slot in self._slots:
            if slot.captured is not None:
                slot.captured.add_rows(slot.start, rows[first : first + slot.tokens])
            first += slot.tokens

    def _on_sample(self, _module: torch.nn.Module, _inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Row i of the processed log-probs [requests, vocabulary] is request i's; excluded tokens are at −inf."""
        logprobs = output[1]
        chosen = [
            (index, slot.captured)
            for index, slot in enumerate(self._slots)
            if slot.captured is not None and slot.captured.wants_candidates(slot.start + slot.tokens - 1)
        ]
        if not chosen:
            return
        allowed = logprobs[[index for index, _ in chosen]] > -torch.inf
        counts = allowed.sum(dim=1).cpu().numpy()
        ids = allowed.nonzero()[:, 1].to(torch.int32).cpu().numpy()
        for (_, captured), token_ids in zip(chosen, np.split(ids, np.cumsum(counts)[:-1]), strict=True):
            # A copy, so that a long sample does not keep the whole step's ids alive.
            captured.add_candidates(token_ids.copy())


def _moe_layers(model: torch.nn.Module) -> dict[int, Any]:
    return {module.layer_id: module for module in model.modules() if isinstance(module, MoERunner)}
