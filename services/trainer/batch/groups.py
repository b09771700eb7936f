"""Scored groups as they arrive, checked against their contract and turned into training samples."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from trivet.v1 import sample_pb2, step_pb2

from services.common.config import Config
from services.common.errors import InvalidData
from services.common.wire.replay_data import Replay, check_model_bounds, decode_replay
from services.common.wire.samples import check_logprobs, sample_id
from services.trainer.batch.model_facts import ModelFacts
from services.trainer.batch.rewards import advantages_in_groups, shaped_rewards
from services.trainer.batch.samples import TrainSample


def batch_samples(order: step_pb2.StepOrder, config: Config, facts: ModelFacts) -> list[TrainSample]:
    """In the order of the groups. Raises InvalidData as training_samples and given_answers do."""
    if config.data.preferences is not None:
        return [sample for scored in order.groups for sample in given_answers(scored, facts)]
    rewards = shaped_rewards(order.groups, config)
    advantages = advantages_in_groups(rewards, config.algorithm.advantage_normalization)
    samples: list[TrainSample] = []
    for scored, reward, advantage in zip(order.groups, rewards, advantages, strict=True):
        samples += training_samples(
            scored,
            order.replay[len(samples) : len(samples) + len(reward)],
            facts,
            rewards=reward,
            advantages=advantage,
        )
    return samples


FINISH_REASONS = {sample_pb2.FINISH_REASON_STOP, sample_pb2.FINISH_REASON_LENGTH}


def check_group(scored: sample_pb2.ScoredGroup) -> None:
    """What can be said without the replay data. Raises InvalidData that names the field."""
    group, size = scored.group, scored.group.prompt.group_size
    name = group.prompt.group_id
    if not size or len(group.samples) != size or len(scored.scores) != size:
        raise InvalidData(
            "group_size",
            f"group {name} has {len(group.samples)} samples and {len(scored.scores)} scores, "
            f"expected {size or 'at least one'} of each",
        )
    if sorted(sample.index for sample in group.samples) != list(range(size)):
        raise InvalidData("sample_index", f"group {name} has not each index of 0..{size - 1} once")
    for sample, score in zip(group.samples, scored.scores, strict=True):
        _check_sample(group.prompt, sample)
        if not math.isfinite(score.reward):
            raise InvalidData("reward_not_finite", f"reward of {sample.sample_id} is {score.reward}, expected finite")


def _check_sample(prompt: sample_pb2.Prompt, sample: sample_pb2.Sample) -> None:
    name, length, limit = sample_id(prompt, sample.index), len(sample.token_ids), prompt.sampling.max_tokens
    if sample.sample_id != name:
        raise InvalidData("sample_id", f"sample_id of sample {name} is {sample.sample_id[:200]!r}, expected its own")
    if not 1 <= length <= limit:
        raise InvalidData(
            "completion_length", f"sample {name} has {length} tokens, expected 1 to {limit} (sampling.max_tokens)"
        )
    check_logprobs(sample, f"sample {name}")
    if sample.finish_reason not in FINISH_REASONS:
        raise InvalidData("finish_reason", f"finish_reason of {name} is {sample.finish_reason}, expected 1 or 2")
    _check_versions(sample, name)


def _check_versions(sample: sample_pb2.Sample, name: str) -> None:
    covered = 0
    for span in sample.versions:
        if span.start != covered or span.end < span.start:
            break
        covered = span.end
    else:
        if sample.versions and covered == len(sample.token_ids):
            return
    spans = [(span.start, span.end) for span in sample.versions[:8]]
    raise InvalidData(
        "version_spans",
        f"versions of {name} span {spans}, expected them to cover [0, {len(sample.token_ids)}) in order",
    )


def training_samples(
    scored: sample_pb2.ScoredGroup,
    replays: Sequence[bytes],
    facts: ModelFacts,
    *,
    rewards: Sequence[float],
    advantages: Sequence[float],
) -> list[TrainSample]:
    """`replays`, `rewards` and `advantages` stand in the order of the samples.

    Raises InvalidData where replay data is missing, malformed, or cannot be this model's.
    """
    group = scored.group
    prompt = np.asarray(group.prompt.token_ids, np.int32)
    _check_vocabulary(group.prompt.group_id, prompt, facts.vocabulary)
    samples = []
    for sample, data, reward, advantage in zip(group.samples, replays, rewards, advantages, strict=True):
        token_ids = np.asarray(sample.token_ids, np.int32)
        _check_vocabulary(sample.sample_id, token_ids, facts.vocabulary)
        replay = decode_replay(
            data,
            sample_id=sample.sample_id,
            prompt_length=len(prompt),
            token_ids=token_ids,
            max_bytes=(len(prompt) + len(token_ids)) * facts.replay_bytes_per_token,
        )
        if not facts.moe_layers:
            # Recorded from a router that the trainer does not replay.
            replay = replace(replay, routing=None)
        _check_complete(sample.sample_id, replay, facts, candidates_expected=_truncates(group.prompt.sampling))
        check_model_bounds(
            replay,
            moe_layers=facts.moe_layers,
            experts_per_token=facts.experts_per_token,
            experts=facts.experts,
            vocabulary=facts.vocabulary,
        )
        samples.append(
            TrainSample(
                sample_id=sample.sample_id,
                group_id=group.prompt.group_id,
                prompt_token_ids=prompt,
                token_ids=token_ids,
                rollout_logprobs=np.asarray(sample.logprobs, np.float32),
                replay=replay,
                advantage=advantage,
                reward=reward,
                temperature=group.prompt.sampling.temperature,
                truncated=sample.finish_reason == sample_pb2.FINISH_REASON_LENGTH,
                max_tokens=group.prompt.sampling.max_tokens,
            )
        )
    return samples


def given_answers(scored: sample_pb2.ScoredGroup, facts: ModelFacts) -> list[TrainSample]:
    """Answers from a file. Nobody sampled them: they have no replay, and their log-probs are 0, which no one reads.

    Raises InvalidData for a token that the model does not know.
    """
    group = scored.group
    prompt = np.asarray(group.prompt.token_ids, np.int32)
    _check_vocabulary(group.prompt.group_id, prompt, facts.vocabulary)
    samples = []
    for sample, score in zip(group.samples, scored.scores, strict=True):
        token_ids = np.asarray(sample.token_ids, np.int32)
        _check_vocabulary(sample.sample_id, token_ids, facts.vocabulary)
        samples.append(
            TrainSample(
                sample_id=sample.sample_id,
                group_id=group.prompt.group_id,
                prompt_token_ids=prompt,
                token_ids=token_ids,
                rollout_logprobs=np.zeros(len(token_ids), np.float32),
                replay=Replay(),
                advantage=0.0,
                reward=score.reward,
            )
        )
    return samples


def _truncates(sampling: sample_pb2.SamplingParameters) -> bool:
    """As the sample was drawn: the configuration may have changed since."""
    return sampling.top_k > 0 or 0 < sampling.top_p < 1


def _check_complete(sample_id: str, replay: Replay, facts: ModelFacts, *, candidates_expected: bool) -> None:
    if facts.moe_layers and replay.routing is None:
        raise InvalidData(
            "routing_missing", f"replay of {sample_id} has no routing, expected it for {facts.moe_layers} layers"
        )
    if candidates_expected and replay.candidates is None:
        raise InvalidData("candidates_missing", f"replay of {sample_id} has no candidates, but sampling truncates")


def _check_vocabulary(name: str, token_ids: np.ndarray[tuple[int], np.dtype[np.int32]], vocabulary: int) -> None:
    if token_ids.size and (int(token_ids.min()) < 0 or int(token_ids.max()) >= vocabulary):
        raise InvalidData(
            "token_out_of_range",
            f"token ids of {name} span {token_ids.min()} to {token_ids.max()}, expected 0 to {vocabulary - 1}",
        )
