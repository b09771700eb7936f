"""Starts vLLM's AsyncLLM and finds out its properties."""

import asyncio
import multiprocessing
import os
import time
import uuid
from dataclasses import dataclass
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from services.common.config import Config, ConfigError
from services.rollout.engine.protocol import EngineFailed
from services.rollout.vllm_engine.arguments import Capture, base_arguments, capture_arguments
from services.rollout.vllm_engine.limits import seed_refusal
from services.rollout.vllm_engine.start_failure import naming_failure
from services.rollout.vllm_engine.weight_update import check_reload

SHUTDOWN_SECONDS = 1.0
# Finished requests whose captured data a worker keeps until it is taken.
CAPTURES_KEPT = 4096


@dataclass(frozen=True)
class Launched:
    """A running engine under the model's own weights. `identity` is that of this start."""

    llm: AsyncLLM
    identity: str
    capture: Capture
    vocabulary: int
    tied: bool
    seed_refusal: str | None
    tokenizer: Any
    moe_layers: list[int]
    devices: list[str]


class Launcher:
    def __init__(self, config: Config, seed: int) -> None:
        self._config, self._seed = config, seed
        self._building: asyncio.Task[tuple[AsyncLLM, Capture]] | None = None
        self._closed = False

    async def launch(self) -> Launched:
        """Raises ConfigError for options that cannot work together, Unavailable with vLLM's reason for the rest."""
        with naming_failure():
            self._building = asyncio.create_task(asyncio.to_thread(self._build))
            llm, capture = await asyncio.shield(self._building)
            self._building = None
            try:
                return await self._examine(llm, capture)
            except BaseException:
                await end(llm)
                raise

    async def close(self) -> AsyncLLM | None:
        """No more launches. Returns the engine of a launch that could not be ended any more.

        A start runs in a thread and cannot be cancelled, only made to fail: by ending the processes it started.
        """
        self._closed = True
        building = self._building
        if building is None:
            return None
        deadline = time.monotonic() + 3 * SHUTDOWN_SECONDS
        while not building.done() and time.monotonic() < deadline:
            for child in multiprocessing.active_children():
                child.kill()
            await asyncio.wait([building], timeout=0.1)
        return building.result()[0] if building.done() and building.exception() is None else None

    async def _examine(self, llm: AsyncLLM, capture: Capture) -> Launched:
        layers = await llm.collective_rpc("trivet_moe_layers")
        if capture == "worker_extension":
            await llm.collective_rpc("trivet_start_capture", args=(CAPTURES_KEPT,))
        await llm.collective_rpc("trivet_prepare_reload")
        await check_reload(llm, self._config.model.path)
        return Launched(
            llm=llm,
            identity=uuid.uuid4().hex[:8],
            capture=capture,
            vocabulary=llm.model_config.get_vocab_size(),
            tied=bool(getattr(llm.model_config.hf_text_config, "tie_word_embeddings", False)),
            seed_refusal=seed_refusal(
                llm.vllm_config.scheduler_config, self._config.model.max_length, cpu=current_platform.is_cpu()
            ),
            tokenizer=llm.get_tokenizer(),
            moe_layers=sorted({layer for part in layers for layer in part}),
            devices=await llm.collective_rpc("trivet_device"),
        )

    def _build(self) -> tuple[AsyncLLM, Capture]:
        cpu = current_platform.is_cpu()
        wanted = self._config.rollout.capture
        if cpu and wanted == "native":
            raise ConfigError(
                "rollout.capture is 'native', expected worker_extension or auto: vLLM has it on GPUs only"
            )
        arguments = base_arguments(self._config, seed=self._seed, cpu=cpu)
        capture: Capture = "worker_extension"
        try:
            moe = False
            if not cpu and wanted != "worker_extension":
                probe = AsyncEngineArgs(**arguments).create_engine_config()
                moe = probe.model_config.get_num_experts() > 0
                capture = "native" if wanted == "native" or probe.use_v2_model_runner else "worker_extension"
            arguments |= capture_arguments(self._config, capture, moe=moe)
            if self._closed:
                raise EngineFailed("engine_stopped", "engine was closed while it started")
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if capture == "native" else "0"
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments)), capture
        except (TypeError, ValueError) as error:
            raise ConfigError(f"rollout.engine: vLLM cannot start with these options ({error})") from error


async def end(llm: AsyncLLM) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    # Requests that still wait would wait forever.
    llm.output_processor.propagate_error(EngineDeadError())
    if llm.output_handler is not None:
        llm.output_handler.cancel()
    await asyncio.to_thread(llm.shutdown, SHUTDOWN_SECONDS)
