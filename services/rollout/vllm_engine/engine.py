"""vLLM's AsyncLLM behind the Engine protocol. vllm is imported here, where it is started, and by the extension."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from trivet.v1 import rollout_pb2, sample_pb2, weights_pb2
from vllm import SamplingParams, TokensPrompt
from vllm.exceptions import VLLMClientError
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from services.common.config import Config
from services.common.config.sampling_limits import MIN_TEMPERATURE
from services.common.errors import InvalidData, Unavailable
from services.common.logs import get_logger
from services.common.transport.weight_feed import verify_weights
from services.common.wire.replay_data import Replay
from services.rollout.capture.chunks import check_replay, open_chunk
from services.rollout.engine import metrics
from services.rollout.engine.delivery import Delivery
from services.rollout.engine.protocol import EngineFailed, EngineSample, LoadFailed, NotServed
from services.rollout.engine.tasks import together, unless
from services.rollout.vllm_engine.arguments import CAPTURE_KEY, Capture
from services.rollout.vllm_engine.launch import Launched, Launcher, end
from services.rollout.vllm_engine.layout import Layout, check_layout, initial_weights, read_layout
from services.rollout.vllm_engine.limits import candidate_refusal, truncates
from services.rollout.vllm_engine.outputs import native_replay, sample_from, weight_label
from services.rollout.vllm_engine.reported import Reported
from services.rollout.vllm_engine.weight_update import announced_layout, join, load, receive, relabel

MAX_RESTARTS = 3

Change = Callable[[AsyncLLM], Awaitable[None]]

log = get_logger(__name__)


class VllmEngine:
    """Needs `launch` first. Survives the death of vLLM's processes up to MAX_RESTARTS times in a row."""

    def __init__(self, config: Config, seed: int) -> None:
        self._config = config
        self._launcher = Launcher(config, seed)
        self._llm: AsyncLLM | None = None
        # The last whose process died by itself.
        self._died: AsyncLLM | None = None
        # Of the last start, also while the engine is down.
        self._launched: Launched | None = None
        self._group: str | None = None
        self._initial = self._weights = self._on_disk = initial_weights(Path(config.model.path))
        self._layout = read_layout(Path(config.model.path))
        self._changing = asyncio.Lock()
        self._usable = asyncio.Event()
        self._gave_up = asyncio.Event()
        self._problem: str | None = "engine is starting"
        self._restarts = 0
        self._numbers = itertools.count()
        self._abandoned: list[str] = []
        self._background: set[asyncio.Task[None]] = set()
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
        return self._launched.vocabulary if self._launched is not None else 0

    @property
    def problem(self) -> str | None:
        return self._problem

    @property
    def capture(self) -> Capture:
        return self._launched.capture if self._launched is not None else "worker_extension"

    @property
    def identity(self) -> str:
        return self._launched.identity if self._launched is not None else ""

    @property
    def devices(self) -> list[str]:
        return self._launched.devices if self._launched is not None else []

    async def wait_gave_up(self) -> str:
        await self._gave_up.wait()
        return self._problem or "engine gave up"

    def refusal(self, sampling: sample_pb2.SamplingParameters, capture: bool) -> str | None:
        if sampling.HasField("seed") and self._launched is not None and self._launched.seed_refusal is not None:
            return self._launched.seed_refusal
        return candidate_refusal(sampling, captured=capture, config=self._config, capture=self.capture)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: sample_pb2.SamplingParameters,
        sample_ids: Sequence[str],
        *,
        capture: bool,
    ) -> list[EngineSample]:
        llm: AsyncLLM | None = None
        try:
            async with asyncio.timeout(self._config.rollout.generate_timeout_seconds):
                await self._usable.wait()
                launched = self._running()
                llm = launched.llm
                samples = await self._generate(launched, list(prompt_token_ids), sampling, sample_ids, capture)
        except TimeoutError as error:
            seconds = self._config.rollout.generate_timeout_seconds
            if llm is None:
                raise NotServed("engine_stopped", f"the engine did not run for {seconds:g} seconds") from error
            raise EngineFailed("generate_timeout", f"no samples after {seconds:g} seconds") from error
        except EngineDeadError as error:
            if llm is not None and self._llm is llm:
                self._died = llm
                self._shut("engine's process died")
                self._spawn(self._revive(llm))
            elif llm is not self._died:
                raise NotServed("engine_restarted", self._problem or "the engine was started again") from error
            # One of the prompts that ran may be why.
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

    async def join_transfer(self, request: rollout_pb2.JoinTransferRequest) -> None:
        left = asyncio.Event()
        try:
            await asyncio.shield(self._spawn(self._join(request, left)))
        finally:
            left.set()

    async def receive_weights(self, delivery: Delivery) -> None:
        await asyncio.shield(self._spawn(self._receive(delivery)))

    async def close(self) -> None:
        self._closed = True
        self._shut("engine is closed")
        for task in list(self._background):
            task.cancel()
        self._llm = await self._launcher.close() or self._llm
        await self._discard()

    def _running(self) -> Launched:
        if self._llm is None or self._launched is None or not self._usable.is_set():
            raise NotServed("engine_stopped", self._problem or "engine is not running")
        return self._launched

    async def _generate(
        self,
        launched: Launched,
        prompt: list[int],
        sampling: sample_pb2.SamplingParameters,
        sample_ids: Sequence[str],
        capture: bool,
    ) -> list[EngineSample]:
        # A redelivered sample has the id of the one before; the worker must not mix up what it captured of them.
        keys = [f"{sample_id}#{next(self._numbers)}" for sample_id in sample_ids]
        moe_layers, tokenizer = launched.moe_layers, launched.tokenizer
        truncated = truncates(sampling)
        extension = capture and self.capture == "worker_extension"
        replays: list[Replay | None] = [None] * len(keys)
        taken = False
        try:
            outputs = await together(
                [
                    _complete(launched.llm, prompt, self._parameters(sampling, index, key if extension else None), key)
                    for index, key in enumerate(keys)
                ]
            )
            if extension:
                drop, self._abandoned = self._abandoned, []
                chunks = (await launched.llm.collective_rpc("trivet_take", args=(keys, drop)))[0]
                taken = True
                replays = [
                    open_chunk(chunk, key, candidates=truncated) for key, chunk in zip(keys, chunks, strict=True)
                ]
            elif capture:
                replays = [native_replay(output, moe_layers, candidates=truncated) for output in outputs]
        finally:
            if extension and not taken:
                self._abandoned += keys
        moe = bool(moe_layers)
        for key, output, replay in zip(keys, outputs, replays, strict=True):
            if replay is not None:
                check_replay(replay, key, prompt_length=len(prompt), completion_length=len(output.token_ids), moe=moe)
        reported = self._reported(sampling)
        return [
            sample_from(output, replay, tokenizer, reported) for output, replay in zip(outputs, replays, strict=True)
        ]

    def _reported(self, sampling: sample_pb2.SamplingParameters) -> Reported:
        return Reported(self._config.rollout.logprobs_mode, sampling.temperature)

    def _parameters(self, sampling: sample_pb2.SamplingParameters, index: int, key: str | None) -> SamplingParams:
        temperature, top_k, top_p = sampling.temperature, sampling.top_k, sampling.top_p
        if self.capture == "native" and self._config.sampling.truncates:
            # With its mask on, vLLM takes neither temperature 0 nor top_k 0; these say the same.
            temperature, top_k, top_p = (1.0, 1, 1.0) if temperature == 0 else (temperature, top_k, top_p)
            top_k = top_k or self.vocabulary
        return SamplingParams(
            # float32 carries a little less than the lowest that vLLM draws at, which would warn of it for each sample.
            temperature=max(temperature, MIN_TEMPERATURE) if temperature else 0.0,
            top_k=top_k,
            top_p=top_p,
            max_tokens=sampling.max_tokens,
            seed=sampling.seed + index if sampling.HasField("seed") else None,
            logprobs=self._reported(sampling).logprobs,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={CAPTURE_KEY: {"id": key, "candidates": truncates(sampling)}} if key is not None else None,
        )

    async def _load(self, weights: weights_pb2.WeightVersion) -> None:
        async with self._changing:
            try:
                layout = await asyncio.to_thread(self._verified_layout, weights)
            except (InvalidData, Unavailable) as error:
                raise LoadFailed(error.code, str(error)) from error
            await self._swap_or_restart(weights, lambda llm: load(llm, weights.path))
            self._layout = self._layout or layout

    def _verified_layout(self, weights: weights_pb2.WeightVersion) -> Layout:
        verify_weights(weights)
        return self._checked_layout(read_layout(Path(weights.path)))

    def _checked_layout(self, layout: Layout) -> Layout:
        if self._layout:
            tied = self._launched is not None and self._launched.tied
            check_layout(layout, self._layout, tied=tied)
        return layout

    async def _join(self, request: rollout_pb2.JoinTransferRequest, left: asyncio.Event) -> None:
        async with self._changing:
            if self._llm is None:
                raise LoadFailed("engine_stopped", self._problem or "engine is not running")
            self._group = None
            try:
                async with asyncio.timeout(self._config.weights.timeout_seconds):
                    if not await unless(left, join(self._llm, request)):
                        raise TimeoutError
            except TimeoutError as error:
                # The worker would wait for the others forever.
                await self._restart("a transfer group did not come about")
                raise LoadFailed("transfer_timeout", f"{request.group} did not come about in time") from error
            except Exception as error:
                raise LoadFailed(
                    "transfer_join", f"the engine could not join group {request.group} ({error})"
                ) from error
            self._group = request.group

    async def _receive(self, delivery: Delivery) -> None:
        begin = delivery.begin
        async with self._changing:
            if begin.group != self._group:
                raise LoadFailed(
                    "transfer_group", f"the update is for {begin.group}, this engine is in {self._group or 'no group'}"
                )
            try:
                layout = self._checked_layout(announced_layout(begin))
            except InvalidData as error:
                raise LoadFailed(error.code, str(error)) from error
            await self._swap_or_restart(begin.weights, lambda llm: receive(llm, delivery))
            self._layout = self._layout or layout

    async def _swap_or_restart(self, weights: weights_pb2.WeightVersion, change: Change) -> None:
        if self._llm is None:
            raise LoadFailed("engine_stopped", self._problem or "engine is not running")
        try:
            await self._swap(self._llm, weights, change)
        except LoadFailed:
            raise
        except Exception as error:
            # Whatever it was, the weights in memory are neither the old ones nor the new.
            await self._restart(f"version {weights.version} could not be loaded")
            where = weights.path or f"version {weights.version}"
            raise LoadFailed("weights_refused", f"the engine could not load {where} ({error!r})") from error

    async def _swap(self, llm: AsyncLLM, weights: weights_pb2.WeightVersion, change: Change) -> None:
        seconds = self._config.rollout.load_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                await llm.pause_generation(mode=self._config.rollout.update)
        except TimeoutError as error:
            await llm.resume_generation()
            raise LoadFailed("weights_timeout", f"running samples did not end within {seconds:g} seconds") from error
        async with asyncio.timeout(seconds):
            try:
                await change(llm)
            except LoadFailed:
                await llm.resume_generation()
                raise
            await relabel(llm, weight_label(weights))
            self._weights = weights
            if weights.path:
                self._on_disk = weights
            await llm.resume_generation()

    async def _revive(self, llm: AsyncLLM) -> None:
        async with self._changing:
            if self._llm is llm:
                await self._restart("its process died")

    async def _restart(self, reason: str) -> None:
        """Back to the newest weights on disk, or to the initial ones if those are missing. Needs the lock."""
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
        # Weights that came from the trainer's memory are lost.
        good, choices = self._on_disk, [self._initial]
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
        llm = await self._launch()
        if weights.fingerprint != self._initial.fingerprint:
            await asyncio.to_thread(verify_weights, weights)
            await self._swap(llm, weights, lambda llm: load(llm, weights.path))

    async def _launch(self) -> AsyncLLM:
        self._launched = await self._launcher.launch()
        self._llm = llm = self._launched.llm
        self._group, self._abandoned, self._died = None, [], None
        await llm.update_weight_version(weight_label(self._initial))
        return llm

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
        if llm is not None:
            await end(llm)

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
