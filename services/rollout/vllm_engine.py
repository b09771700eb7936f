"""vLLM's AsyncLLM behind the Engine protocol: the one importer of vllm, beside the extension that vLLM loads."""

import asyncio
import itertools
import multiprocessing
import os
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from trivet.v1 import sample_pb2, weights_pb2
from vllm import SamplingParams, TokensPrompt
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from services.common.config import Config, ConfigError
from services.common.errors import InvalidData
from services.common.logs import get_logger
from services.common.replay import Replay
from services.common.weights import describe_weights, verify_weights
from services.rollout import metrics
from services.rollout.arguments import RECORD, Capture, base_arguments, capture_arguments
from services.rollout.engine import EngineFailed, EngineSample, LoadFailed
from services.rollout.layout import check_layout, read_layout
from services.rollout.outputs import native_replay, sample_from, weight_label
from services.rollout.parcels import check_replay, open_parcel
from services.rollout.refusals import candidate_refusal, seed_refusal, truncates
from services.rollout.reported import Reported
from services.rollout.tasks import together
from services.rollout.update import load_paused

MAX_RESTARTS = 3
SHUTDOWN_SECONDS = 1.0
# Finished recordings that a worker keeps until they are taken.
RECORDINGS_KEPT = 4096

log = get_logger(__name__)


class VllmEngine:
    """Needs `launch` first. Survives the death of vLLM's processes up to MAX_RESTARTS times in a row."""

    def __init__(self, config: Config, seed: int) -> None:
        self._config, self._seed = config, seed
        self._llm: AsyncLLM | None = None
        self._capture: Capture = "worker_extension"
        self._moe_layers: list[int] = []
        self._initial = self._weights = _initial_weights(Path(config.model.path))
        self._layout = read_layout(Path(config.model.path))
        self._changing = asyncio.Lock()
        self._usable = asyncio.Event()
        self._gave_up = asyncio.Event()
        self._problem: str | None = "engine is starting"
        self._restarts = 0
        self._numbers = itertools.count()
        self._abandoned: list[str] = []
        self._background: set[asyncio.Task[None]] = set()
        self._building: asyncio.Task[AsyncLLM] | None = None
        self._vocabulary = 0
        self._tied = False
        self._seed_refusal: str | None = None
        self._closed = False

    async def launch(self) -> None:
        await self._launch()
        self._open()

    @property
    def weights(self) -> weights_pb2.WeightVersion:
        return self._weights

    @property
    def max_length(self) -> int:
        return self._config.model.max_length

    @property
    def vocabulary(self) -> int:
        return self._vocabulary

    @property
    def problem(self) -> str | None:
        return self._problem

    @property
    def capture(self) -> Capture:
        return self._capture

    async def wait_gave_up(self) -> str:
        await self._gave_up.wait()
        return self._problem or "engine gave up"

    def refusal(self, sampling: sample_pb2.SamplingParameters, record: bool) -> str | None:
        if sampling.HasField("seed") and self._seed_refusal is not None:
            return self._seed_refusal
        return candidate_refusal(sampling, record=record, config=self._config, capture=self._capture)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: sample_pb2.SamplingParameters,
        sample_ids: Sequence[str],
        *,
        record: bool,
    ) -> list[EngineSample]:
        llm: AsyncLLM | None = None
        try:
            async with asyncio.timeout(self._config.rollout.generate_timeout_seconds):
                await self._usable.wait()
                llm = self._running()
                samples = await self._generate(llm, list(prompt_token_ids), sampling, sample_ids, record)
        except TimeoutError as error:
            seconds = self._config.rollout.generate_timeout_seconds
            raise EngineFailed("generate_timeout", f"no samples after {seconds:g} seconds") from error
        except EngineDeadError as error:
            if llm is not None and self._llm is llm:
                self._shut("engine's process died")
                self._spawn(self._revive(llm))
            raise EngineFailed("engine_dead", "the engine's process died") from error
        except EngineGenerateError as error:
            raise EngineFailed("engine_error", f"the engine failed on the request ({error.__cause__})") from error
        except VLLMClientError as error:
            raise InvalidData("request_refused", f"the engine refuses the request ({error})") from error
        self._restarts = 0
        return samples

    async def load_weights(self, weights: weights_pb2.WeightVersion) -> None:
        # Shielded: a caller that goes away must not leave new weights under the old label.
        await asyncio.shield(self._spawn(self._load(weights)))

    async def close(self) -> None:
        self._closed = True
        self._shut("engine is closed")
        for task in list(self._background):
            task.cancel()
        await self._interrupt_build()
        await self._discard()

    def _running(self) -> AsyncLLM:
        if self._llm is None or not self._usable.is_set():
            raise EngineFailed("engine_stopped", self._problem or "engine is not running")
        return self._llm

    async def _generate(
        self,
        llm: AsyncLLM,
        prompt: list[int],
        sampling: sample_pb2.SamplingParameters,
        sample_ids: Sequence[str],
        record: bool,
    ) -> list[EngineSample]:
        # A redelivered sample has the id of the one before; the worker must not mix their recordings up.
        keys = [f"{sample_id}#{next(self._numbers)}" for sample_id in sample_ids]
        truncated = truncates(sampling)
        extension = record and self._capture == "worker_extension"
        replays: list[Replay | None] = [None] * len(keys)
        taken = False
        try:
            outputs = await together(
                [
                    _complete(llm, prompt, self._parameters(sampling, index, key if extension else None), key)
                    for index, key in enumerate(keys)
                ]
            )
            if extension:
                drop, self._abandoned = self._abandoned, []
                parcels = (await llm.collective_rpc("trivet_take", args=(keys, drop)))[0]
                taken = True
                replays = [
                    open_parcel(parcel, key, candidates=truncated) for key, parcel in zip(keys, parcels, strict=True)
                ]
            elif record:
                replays = [native_replay(output, self._moe_layers, candidates=truncated) for output in outputs]
        finally:
            if extension and not taken:
                self._abandoned += keys
        moe = bool(self._moe_layers)
        for key, output, replay in zip(keys, outputs, replays, strict=True):
            if replay is not None:
                check_replay(replay, key, prompt_length=len(prompt), completion_length=len(output.token_ids), moe=moe)
        reported = self._reported(sampling)
        return [
            sample_from(output, replay, self._tokenizer, reported)
            for output, replay in zip(outputs, replays, strict=True)
        ]

    def _reported(self, sampling: sample_pb2.SamplingParameters) -> Reported:
        return Reported(self._config.rollout.logprobs_mode, sampling.temperature)

    def _parameters(self, sampling: sample_pb2.SamplingParameters, index: int, key: str | None) -> SamplingParams:
        temperature, top_k, top_p = sampling.temperature, sampling.top_k, sampling.top_p
        if self._capture == "native" and self._config.sampling.truncates:
            # With its mask on, vLLM takes neither temperature 0 nor top_k 0; these say the same.
            temperature, top_k, top_p = (1.0, 1, 1.0) if temperature == 0 else (temperature, top_k, top_p)
            top_k = top_k or self._vocabulary
        return SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            max_tokens=sampling.max_tokens,
            seed=sampling.seed + index if sampling.HasField("seed") else None,
            logprobs=self._reported(sampling).logprobs,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={RECORD: {"id": key, "candidates": truncates(sampling)}} if key is not None else None,
        )

    async def _load(self, weights: weights_pb2.WeightVersion) -> None:
        async with self._changing:
            try:
                layout = await asyncio.to_thread(self._verified_layout, weights)
            except InvalidData as error:
                raise LoadFailed(error.code, str(error)) from error
            if self._llm is None:
                raise LoadFailed("engine_stopped", self._problem or "engine is not running")
            try:
                await self._swap(self._llm, weights)
            except LoadFailed:
                raise
            except Exception as error:
                # Whatever it was, the weights in memory are neither the old ones nor the new.
                await self._restart(f"version {weights.version} could not be loaded")
                raise LoadFailed("weights_refused", f"the engine could not load {weights.path} ({error})") from error
            self._layout = self._layout or layout

    def _verified_layout(self, weights: weights_pb2.WeightVersion) -> dict[str, tuple[int, ...]]:
        verify_weights(weights)
        layout = read_layout(Path(weights.path))
        if self._layout:
            check_layout(layout, self._layout, tied=self._tied)
        return layout

    async def _swap(self, llm: AsyncLLM, weights: weights_pb2.WeightVersion) -> None:
        seconds = self._config.rollout.load_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                await llm.pause_generation(mode=self._config.rollout.update)
        except TimeoutError as error:
            await llm.resume_generation()
            raise LoadFailed("weights_timeout", f"running samples did not end within {seconds:g} seconds") from error
        async with asyncio.timeout(seconds):
            await load_paused(llm, weights.path, weight_label(weights))
            self._weights = weights
            await llm.resume_generation()

    async def _revive(self, llm: AsyncLLM) -> None:
        async with self._changing:
            if self._llm is llm:
                await self._restart("its process died")

    async def _restart(self, reason: str) -> None:
        """Back to the last good weights, or to the initial ones when those are gone. Needs the lock."""
        if self._closed:
            return
        self._shut(f"engine restarts: {reason}")
        await self._discard()
        self._restarts += 1
        metrics.ENGINE_RESTARTS.inc()
        log.warning("engine restarts", reason=reason, restarts=self._restarts, version=self._weights.version)
        if self._restarts > MAX_RESTARTS:
            self._give_up(f"engine failed {self._restarts} times in a row, the last time because {reason}")
            return
        good, choices = self._weights, [self._initial]
        if good.fingerprint != self._initial.fingerprint:
            choices.insert(0, good)
        for weights in choices:
            try:
                await self._relaunch(weights)
            except Exception as error:  # noqa: BLE001 - what vLLM raises for a failed start or call has no common class
                log.error("engine did not restart", version=weights.version, error=str(error))
                await self._discard()
                continue
            self._open()
            return
        self._give_up(f"engine does not start: {reason}")

    async def _relaunch(self, weights: weights_pb2.WeightVersion) -> None:
        self._weights = self._initial
        await self._launch()
        if weights.fingerprint != self._initial.fingerprint:
            await asyncio.to_thread(verify_weights, weights)
            await self._swap(self._llm, weights)

    async def _launch(self) -> None:
        self._building = asyncio.create_task(asyncio.to_thread(self._build))
        self._llm = llm = await asyncio.shield(self._building)
        self._building = None
        model = llm.model_config
        self._vocabulary = model.get_vocab_size()
        self._seed_refusal = seed_refusal(
            llm.vllm_config.scheduler_config, self.max_length, cpu=current_platform.is_cpu()
        )
        self._tied = bool(getattr(model.hf_text_config, "tie_word_embeddings", False))
        self._tokenizer = llm.get_tokenizer()
        layers = await llm.collective_rpc("trivet_moe_layers")
        self._moe_layers = sorted({layer for part in layers for layer in part})
        if self._capture == "worker_extension":
            await llm.collective_rpc("trivet_record", args=(RECORDINGS_KEPT,))
        self._abandoned = []
        await llm.collective_rpc("trivet_prepare_reload")
        await self._check_reload(llm)
        await llm.update_weight_version(weight_label(self._initial))

    async def _check_reload(self, llm: AsyncLLM) -> None:
        """Reloads the weights that are there already. Raises EngineFailed when that changes them.

        vLLM converts weights for its kernels, and a conversion that a reload forgets shows in no other way.
        """
        before = await llm.compute_weight_checksums()
        await llm.collective_rpc("trivet_reload", args=(self._config.model.path,))
        after = await llm.compute_weight_checksums()
        changed = sorted(name for old, new in zip(before, after, strict=True) for name in old if old[name] != new[name])
        if changed:
            raise EngineFailed(
                "reload_inexact", f"reloading the same weights changes {len(changed)} tensors, the first {changed[0]}"
            )

    def _build(self) -> AsyncLLM:
        cpu = current_platform.is_cpu()
        wanted = self._config.rollout.capture
        if cpu and wanted == "native":
            raise ConfigError(
                "rollout.capture is 'native', expected worker_extension or auto: vLLM has it on GPUs only"
            )
        arguments = base_arguments(self._config, seed=self._seed, cpu=cpu)
        try:
            if cpu or wanted == "worker_extension":
                self._capture, moe = "worker_extension", False
            else:
                probe = AsyncEngineArgs(**arguments).create_engine_config()
                moe = probe.model_config.get_num_experts() > 0
                self._capture = "native" if wanted == "native" or probe.use_v2_model_runner else "worker_extension"
            arguments |= capture_arguments(self._config, self._capture, moe=moe)
            if self._closed:
                raise EngineFailed("engine_stopped", "engine was closed while it started")
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if self._capture == "native" else "0"
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"rollout.engine: vLLM cannot start with these options ({error})") from error

    async def _interrupt_build(self) -> None:
        """A start runs in a thread and cannot be cancelled, only made to fail: by ending the processes it started."""
        building = self._building
        if building is None:
            return
        deadline = time.monotonic() + 3 * SHUTDOWN_SECONDS
        while not building.done() and time.monotonic() < deadline:
            for child in multiprocessing.active_children():
                child.kill()
            await asyncio.wait([building], timeout=0.1)
        if building.done() and building.exception() is None:
            self._llm = building.result()

    def _open(self) -> None:
        self._problem = None
        self._usable.set()

    def _shut(self, problem: str) -> None:
        self._problem = problem
        self._usable.clear()

    def _give_up(self, problem: str) -> None:
        log.error("engine gave up", reason=problem)
        self._shut(problem)
        self._gave_up.set()

    async def _discard(self) -> None:
        llm, self._llm = self._llm, None
        if llm is None:
            return
        # Requests that still wait would wait for ever.
        llm.output_processor.propagate_error(EngineDeadError())
        if llm.output_handler is not None:
            llm.output_handler.cancel()
        await asyncio.to_thread(llm.shutdown, SHUTDOWN_SECONDS)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


async def _complete(llm: AsyncLLM, prompt: list[int], parameters: SamplingParams, key: str) -> CompletionOutput:
    last: CompletionOutput | None = None
    async for output in llm.generate(TokensPrompt(prompt_token_ids=prompt), parameters, key):
        last = output.outputs[0]
    if last is None or last.finish_reason not in {"stop", "length"}:
        reason = last.finish_reason if last is not None else "no output"
        raise EngineFailed("sample_aborted", f"sample {key} ended with {reason}, expected stop or length")
    return last


def _initial_weights(path: Path) -> weights_pb2.WeightVersion:
    """Version 0. A model that is not a local directory has no fingerprint."""
    if any(path.glob("*.safetensors")):
        return describe_weights(path, 0)
    return weights_pb2.WeightVersion(version=0, path=str(path))
