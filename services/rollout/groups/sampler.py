"""Samples one group at a time for the stream's consumer or a caller of the gRPC service, and counts."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

from trivet.v1 import sample_pb2

from services.rollout.engine import metrics
from services.rollout.engine.protocol import Engine, EngineSample
from services.rollout.groups.admission import check_prompt, is_captured
from services.rollout.groups.assemble import SampledGroup, assemble, sample_ids

RATE_SECONDS = 30.0


@dataclass
class Tally:
    """What was sampled since the start; `recent` holds (time, tokens) of the last RATE_SECONDS."""

    groups: int = 0
    samples: int = 0
    tokens: int = 0
    started: float = field(default_factory=time.monotonic)
    recent: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, samples: int, tokens: int) -> None:
        self.groups += 1
        self.samples += samples
        self.tokens += tokens
        self.recent.append((time.monotonic(), tokens))
        self._forget()

    def tokens_per_second(self) -> float:
        self._forget()
        window = min(RATE_SECONDS, time.monotonic() - self.started)
        return sum(tokens for _, tokens in self.recent) / window if window > 0 else 0.0

    def _forget(self) -> None:
        oldest = time.monotonic() - RATE_SECONDS
        while self.recent and self.recent[0][0] < oldest:
            self.recent.popleft()


class GroupSampler:
    def __init__(self, engine: Engine, *, rollout_id: str, code: str, config: str) -> None:
        self.engine, self.rollout_id = engine, rollout_id
        self.running = 0
        self.tally = Tally()
        self._code, self._config = code, config

    async def sample(self, prompt: sample_pb2.Prompt) -> SampledGroup:
        """Raises InvalidData for a prompt or samples that are no use, EngineFailed when the samples were lost."""
        check_prompt(prompt, self.engine)
        self.running += 1
        metrics.RUNNING_GROUPS.set(self.running)
        start = time.monotonic()
        try:
            samples = await self.engine.generate(
                list(prompt.token_ids), prompt.sampling, sample_ids(prompt), capture=is_captured(prompt)
            )
        finally:
            self.running -= 1
            metrics.RUNNING_GROUPS.set(self.running)
        seconds = time.monotonic() - start
        sampled = await asyncio.to_thread(
            assemble,
            prompt,
            samples,
            rollout_id=self.rollout_id,
            code=self._code,
            config=self._config,
            seconds=seconds,
        )
        self._count(prompt, samples, sampled, seconds)
        return sampled

    def _count(
        self, prompt: sample_pb2.Prompt, samples: list[EngineSample], sampled: SampledGroup, seconds: float
    ) -> None:
        lengths = [len(sample.token_ids) for sample in samples]
        self.tally.add(len(samples), sum(lengths))
        purpose = "evaluation" if prompt.purpose == sample_pb2.PURPOSE_EVALUATION else "train"
        metrics.GROUPS.labels(purpose).inc()
        metrics.SAMPLES.labels(purpose).inc(len(samples))
        metrics.TOKENS.labels(purpose).inc(sum(lengths))
        metrics.TRUNCATED.labels(purpose).inc(sum(sample.finish_reason == "length" for sample in samples))
        metrics.SAMPLING_SECONDS.observe(seconds)
        metrics.TOKEN_SECONDS.observe(seconds / max(1, *lengths))
        metrics.REPLAY_BYTES.inc(sum(map(len, sampled.replays)))
        for length in lengths:
            metrics.COMPLETION_TOKENS.observe(length)
