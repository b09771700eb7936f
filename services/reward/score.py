"""A group's rewards: every scorer on every sample, or the reason why there are none."""

import asyncio
import math
import time
from collections.abc import Mapping

from trivet.v1 import reward_pb2, sample_pb2

from services.common.config import RewardConfig
from services.common.errors import InvalidData, TrivetError, entrys_fault
from services.common.transport.consumer import Failed, Finished, Outcome
from services.common.transport.streams import Entry
from services.common.wire.group import check_group
from services.reward import metrics
from services.reward.cache import ScoreCache, cache_key
from services.reward.isolation.pool import ScorerPool
from services.reward.scorers.types import ScorerFailure
from services.reward.stats import RewardStats
from services.reward.validate import check_texts

RETRY_SECONDS = 0.1
RETRY_CAP_SECONDS = 2.0
# Relative to the range: weights such as 0.1, 0.2 and 0.7 may add up to a little more than 1.
ROUNDING = 1e-9


class GroupScorer:
    """`pool` has to be started."""

    def __init__(self, config: RewardConfig, pool: ScorerPool, stats: RewardStats, reward_id: str) -> None:
        self._config, self._pool, self._stats, self._reward_id = config, pool, stats, reward_id
        self._cache = ScoreCache(config.cache_size)
        self._weights = {label: scorer.weight for label, scorer in zip(pool.labels, config.scorers, strict=True)}

    async def handle(self, entry: Entry[sample_pb2.Group]) -> Outcome[sample_pb2.ScoredGroup]:
        """Of the stream. Raises Unavailable as `score` does."""
        try:
            outcome = await self.score(entry.message)
        except InvalidData as error:
            return Failed(error)
        if isinstance(outcome, sample_pb2.ScoredGroup):
            return Finished(outcome)
        reason = f"{outcome.scorer} on sample {outcome.sample_id}: {outcome.reason}"
        return Failed(TrivetError(outcome.code, reason))

    async def score(self, group: sample_pb2.Group) -> sample_pb2.ScoredGroup | reward_pb2.ScoreFailure:
        """All samples or none: a group that lost some would skew its baseline.

        Raises InvalidData for a group that breaks its contract, or that makes this service raise; Unavailable when no
        scorer process can be started.
        """
        self._stats.started()
        try:
            with entrys_fault():
                check_group(group)
                check_texts(group)
                outcome = await self._score(group)
        except InvalidData as error:
            self._stats.failed(error.code)
            raise
        finally:
            self._stats.ended()
        if isinstance(outcome, reward_pb2.ScoreFailure):
            self._stats.failed(outcome.code)
        else:
            self._stats.scored(outcome)
        return outcome

    async def _score(self, group: sample_pb2.Group) -> sample_pb2.ScoredGroup | reward_pb2.ScoreFailure:
        outcomes = await asyncio.gather(*(self._score_sample(group.prompt, sample) for sample in group.samples))
        scores: list[sample_pb2.Score] = []
        for outcome in outcomes:
            if isinstance(outcome, reward_pb2.ScoreFailure):
                return outcome
            scores.append(outcome)
        return sample_pb2.ScoredGroup(group=group, scores=scores, reward_id=self._reward_id)

    async def _score_sample(
        self, prompt: sample_pb2.Prompt, sample: sample_pb2.Sample
    ) -> sample_pb2.Score | reward_pb2.ScoreFailure:
        values = await asyncio.gather(*(self._value(index, prompt, sample) for index in range(len(self._weights))))
        components: dict[str, float] = {}
        for label, value in zip(self._weights, values, strict=True):
            if isinstance(value, ScorerFailure):
                return _failure(value, label, sample)
            components[label] = value
        score = combine(components, self._weights, self._config)
        if isinstance(score, ScorerFailure):
            return _failure(score, ", ".join(self._weights), sample)
        return score

    async def _value(self, index: int, prompt: sample_pb2.Prompt, sample: sample_pb2.Sample) -> float | ScorerFailure:
        if not self._pool.deterministic[index]:
            return await self._try(index, prompt, sample)
        key = cache_key(self._config.scorers[index], prompt, sample)
        if (known := self._cache.get(key)) is not None:
            self._stats.cache_hit()
            return known
        value = await self._try(index, prompt, sample)
        if not isinstance(value, ScorerFailure):
            self._cache.put(key, value)
        return value

    async def _try(self, index: int, prompt: sample_pb2.Prompt, sample: sample_pb2.Sample) -> float | ScorerFailure:
        label = self._pool.labels[index]
        delay = RETRY_SECONDS
        retried = 0
        while True:
            start = time.monotonic()
            value = await self._pool.score(index, prompt.text, sample.text, prompt.metadata_json)
            metrics.SCORING_SECONDS.labels(label).observe(time.monotonic() - start)
            if not isinstance(value, ScorerFailure):
                return value
            if retried >= useful_retries(value, self._config.retries, self._pool.deterministic[index]):
                return value
            retried += 1
            metrics.RETRIES.labels(label, value.code).inc()
            await asyncio.sleep(delay)
            delay = min(2 * delay, RETRY_CAP_SECONDS)


def useful_retries(failure: ScorerFailure, retries: int, deterministic: bool) -> int:
    """How many of the configured tries may end otherwise.

    A process may have died for lack of memory that another took, and an answer may have been late once: one. What a
    deterministic scorer raised it raises again.
    """
    if not failure.retryable or (deterministic and failure.code != "scorer_crash"):
        return 0
    return min(retries, 1) if failure.code in {"scorer_crash", "scorer_timeout"} else retries


def combine(
    components: Mapping[str, float], weights: Mapping[str, float], config: RewardConfig
) -> sample_pb2.Score | ScorerFailure:
    """The weighted sum of the components, or a failure when it is outside [minimum, maximum].

    With `normalize` the reward is (raw − minimum) / (maximum − minimum).
    """
    try:
        raw = math.fsum(weights[label] * value for label, value in components.items())
    except (OverflowError, ValueError):
        # Terms beyond a float, or infinities of both signs.
        raw = math.nan
    if not math.isfinite(raw):
        return ScorerFailure(f"reward is {raw}, expected a finite number", code="reward_not_finite", retryable=False)
    low, high = config.minimum, config.maximum
    slack = ROUNDING * (high - low)
    if not low - slack <= raw <= high + slack:
        return ScorerFailure(
            f"reward is {raw:g}, expected {low:g} to {high:g} (reward.minimum and reward.maximum)",
            code="reward_out_of_range",
            retryable=False,
        )
    raw = min(max(raw, low), high)
    reward = (raw - low) / (high - low) if config.normalize else raw
    return sample_pb2.Score(reward=reward, raw_reward=raw, components=components)


def _failure(failure: ScorerFailure, scorer: str, sample: sample_pb2.Sample) -> reward_pb2.ScoreFailure:
    return reward_pb2.ScoreFailure(code=failure.code, reason=failure.reason, scorer=scorer, sample_id=sample.sample_id)
