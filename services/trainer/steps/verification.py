"""Compares what comes back with what was issued, before any of it is fetched, trained on or deleted."""

from collections.abc import Callable
from typing import Any, NamedTuple

from trivet.v1 import sample_pb2

from services.common.config import RewardConfig
from services.common.errors import InvalidData
from services.trainer.batch.groups import check_scored_group
from services.trainer.steps.issuer import Issuer

PROMPT_MISMATCH, SAMPLING_MISMATCH, VERSION_UNKNOWN = "prompt_mismatch", "sampling_mismatch", "version_unknown"
VERSION_ABANDONED, TOO_STALE = "version_abandoned", "group_too_stale"
# Of a prompt, what one that comes back has in common with the one that was issued.
ISSUED_FIELDS = ("group_id", "request", "prompt_id", "purpose", "evaluation_id", "token_ids", "text", "metadata_json")
# Relative to the range: what the reward service allows its own sums.
ROUNDING = 1e-9
SHOWN_CHARACTERS = 80


class SamplingSettings(NamedTuple):
    group_size: int
    temperature: float
    top_k: int
    top_p: float
    max_tokens: int
    seed: int | None

    @classmethod
    def of(cls, prompt: sample_pb2.Prompt) -> "SamplingSettings":
        sampling = prompt.sampling
        seed = sampling.seed if sampling.HasField("seed") else None
        return cls(prompt.group_size, sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens, seed)


class Verifier:
    """Prompts are rebuilt for the comparison. Sampling settings may change between two starts of a run while prompts
    are under way: those that its history has issued with are remembered, and each of them is good.
    """

    def __init__(self, issuer: Issuer, reward: RewardConfig, versions: Callable[[], tuple[int, int]]) -> None:
        """`versions` are the oldest that may be trained on and the newest that was published."""
        self._issuer, self._reward, self._versions = issuer, reward, versions
        self._settings = {SamplingSettings.of(issuer.training_prompt(0, 0, 0))}

    def dump(self) -> list[list[Any]]:
        """For the checkpoint."""
        return sorted((list(settings) for settings in self._settings), key=str)

    def restore(self, state: list[list[Any]]) -> None:
        self._settings |= {SamplingSettings(*settings) for settings in state}

    def check_training(self, scored: sample_pb2.ScoredGroup, request: int) -> None:
        """Raises InvalidData that names the field, its value and what was expected."""
        prompt = scored.group.prompt
        issued = self._issuer.training_prompt(request, prompt.attempt, prompt.min_version)
        self._check(scored, issued, self._settings)
        (oldest, newest), (allowed, published) = sampled_versions(scored), self._versions()
        if newest > published:
            raise InvalidData(
                VERSION_UNKNOWN,
                f"group {issued.group_id} was sampled under version {newest}, "
                f"the newest that was published is {published}",
            )
        if oldest < allowed:
            raise InvalidData(
                TOO_STALE,
                f"group {issued.group_id} was sampled under version {oldest}, expected {allowed} or newer "
                "(trainer.max_staleness)",
            )

    def check_evaluation(self, scored: sample_pb2.ScoredGroup, issued: sample_pb2.Prompt) -> None:
        """Raises InvalidData that names the field, its value and what was expected."""
        self._check(scored, issued, {SamplingSettings.of(issued)})
        # Nothing is published during an evaluation, so that one of its groups can be ahead only of a run that has
        # returned to an earlier checkpoint.
        _, newest = sampled_versions(scored)
        if newest > issued.min_version:
            raise InvalidData(
                VERSION_ABANDONED,
                f"group {issued.group_id} was sampled under version {newest}, from which the run has returned to "
                f"{issued.min_version}",
            )

    def _check(
        self, scored: sample_pb2.ScoredGroup, issued: sample_pb2.Prompt, settings: set[SamplingSettings]
    ) -> None:
        prompt = scored.group.prompt
        for name in ISSUED_FIELDS:
            if getattr(prompt, name) != getattr(issued, name):
                raise InvalidData(
                    PROMPT_MISMATCH,
                    f"prompt.{name} of group {issued.group_id} is {_short(getattr(prompt, name))}, "
                    f"issued was {_short(getattr(issued, name))}",
                )
        if (used := SamplingSettings.of(prompt)) not in settings:
            issued_with = " or ".join(map(str, settings))
            raise InvalidData(
                SAMPLING_MISMATCH, f"group {issued.group_id} was sampled with {used}, issued with {issued_with}"
            )
        check_scored_group(scored)
        self._check_rewards(scored)

    def _check_rewards(self, scored: sample_pb2.ScoredGroup) -> None:
        low, high = self._reward.minimum, self._reward.maximum
        lowest, highest = (0.0, 1.0) if self._reward.normalize else (low, high)
        for sample, score in zip(scored.group.samples, scored.scores, strict=True):
            _check_range(f"reward of {sample.sample_id}", score.reward, lowest, highest)
            _check_range(f"raw_reward of {sample.sample_id}", score.raw_reward, low, high)


def sampled_versions(scored: sample_pb2.ScoredGroup) -> tuple[int, int]:
    """The oldest and the newest policy that sampled a checked group."""
    versions = [span.version for sample in scored.group.samples for span in sample.versions]
    return min(versions), max(versions)


def _check_range(field: str, value: float, low: float, high: float) -> None:
    slack = ROUNDING * (high - low)
    if not low - slack <= value <= high + slack:
        raise InvalidData("reward_out_of_range", f"{field} is {value:g}, expected {low:g} to {high:g}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
