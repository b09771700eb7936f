"""Scored groups as they arrive: checked against their contract, and decoded into training samples.

Every check of a group is made once where it enters a service; docs/architecture.md lists them with their codes.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
from trivet.v1 import sample_pb2, step_pb2

from services.common.config import Config
from services.common.errors import InvalidData
from services.common.wire.group import check_group
from services.common.wire.replay_data import Replay, check_model_bounds, decode_replay
from services.common.wire.tensors import Array
from services.trainer.batch.model_facts import ModelFacts
from services.trainer.batch.rewards import advantages_in_groups, shaped_rewards
from services.trainer.batch.samples import TrainSample

FINISH_REASONS = {sample_pb2.FINISH_REASON_STOP, sample_pb2.FINISH_REASON_LENGTH}


def batch_samples(
    order: step_pb2.StepOrder, config: Config, facts: ModelFacts, decoded: Sequence[TrainSample] = ()
) -> list[TrainSample]:
    """The samples of a step in the order of its groups, with what they are trained on: shaped rewards and advantages.

    `decoded` are the same samples, where they were decoded before. Raises InvalidData as decode_group does.
    """
    samples = decoded or _decode(order, config, facts)
    if config.data.preferences is not None:
        return list(samples)
    rewards = shaped_rewards(order.groups, config)
    advantages = advantages_in_groups(rewards, config.algorithm.advantage_normalization)
    return [
        replace(sample, reward=reward, advantage=advantage)
        for sample, reward, advantage in zip(samples, chain(*rewards), chain(*advantages), strict=True)
    ]


def _decode(order: step_pb2.StepOrder, config: Config, facts: ModelFacts) -> list[TrainSample]:
    if config.data.preferences is not None:
        return [sample for scored in order.groups for sample in given_answers(scored, facts)]
    samples: list[TrainSample] = []
    for scored in order.groups:
        replays = order.replay[len(samples) : len(samples) + len(scored.group.samples)]
        samples += decode_group(scored, replays, facts)
    return samples


def check_scored_group(scored: sample_pb2.ScoredGroup) -> None:
    """What can be said without the replay data. Raises InvalidData that names the field."""
    group = scored.group
    check_group(group)
    if len(scored.scores) != len(group.samples):
        raise InvalidData(
            "scores_rows",
            f"group {group.prompt.group_id} has {len(scored.scores)} scores, expected {len(group.samples)}, one a "
            "sample",
        )
    for sample, score in zip(group.samples, scored.scores, strict=True):
        _check_sample(sample, group.prompt.sampling.max_tokens)
        for field, value in (("reward", score.reward), ("raw_reward", score.raw_reward)):
            if not math.isfinite(value):
                raise InvalidData("reward_not_finite", f"{field} of {sample.sample_id} is {value}, expected finite")


def _check_sample(sample: sample_pb2.Sample, limit: int) -> None:
    name, length = sample.sample_id, len(sample.token_ids)
    if not 1 <= length <= limit:
        raise InvalidData(
            "completion_length", f"sample {name} has {length} tokens, expected 1 to {limit} (sampling.max_tokens)"
        )
    if sample.finish_reason not in FINISH_REASONS:
        raise InvalidData("finish_reason", f"finish_reason of {name} is {sample.finish_reason}, expected 1 or 2")
    _check_versions(sample)


def _check_versions(sample: sample_pb2.Sample) -> None:
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
        f"versions of {sample.sample_id} span {spans}, expected them to cover [0, {len(sample.token_ids)}) in order",
    )


def decode_group(scored: sample_pb2.ScoredGroup, replays: Sequence[bytes], facts: ModelFacts) -> list[TrainSample]:
    """A checked group's samples, rewarded as they were scored and without advantages; `replays` in the same order.

    Raises InvalidData where replay data is missing, malformed, or cannot be this model's.
    """
    prompt, sampling = scored.group.prompt, scored.group.prompt.sampling
    prompt_ids = _token_ids(prompt.group_id, prompt.token_ids, facts)
    samples = []
    for sample, score, data in zip(scored.group.samples, scored.scores, replays, strict=True):
        token_ids = _token_ids(sample.sample_id, sample.token_ids, facts)
        samples.append(
            TrainSample(
                sample_id=sample.sample_id,
                group_id=prompt.group_id,
                prompt_token_ids=prompt_ids,
                token_ids=token_ids,
                rollout_logprobs=np.asarray(sample.logprobs, np.float32),
                replay=_replay(data, sample.sample_id, len(prompt_ids), token_ids, sampling, facts),
                advantage=0.0,
                reward=score.reward,
                temperature=sampling.temperature,
                truncated=sample.finish_reason == sample_pb2.FINISH_REASON_LENGTH,
                max_tokens=sampling.max_tokens,
            )
        )
    return samples


def given_answers(scored: sample_pb2.ScoredGroup, facts: ModelFacts) -> list[TrainSample]:
    """Answers from a file. Nobody sampled them: they have no replay, and their log-probs are 0, which no one reads.

    Raises InvalidData for a token that the model does not know.
    """
    prompt = scored.group.prompt
    prompt_ids = _token_ids(prompt.group_id, prompt.token_ids, facts)
    return [
        TrainSample(
            sample_id=sample.sample_id,
            group_id=prompt.group_id,
            prompt_token_ids=prompt_ids,
            token_ids=_token_ids(sample.sample_id, sample.token_ids, facts),
            rollout_logprobs=np.zeros(len(sample.token_ids), np.float32),
            replay=Replay(),
            advantage=0.0,
            reward=score.reward,
        )
        for sample, score in zip(scored.group.samples, scored.scores, strict=True)
    ]


def _token_ids(name: str, given: Sequence[int], facts: ModelFacts) -> Array:
    token_ids = np.asarray(given, np.int32)
    if token_ids.size and (int(token_ids.min()) < 0 or int(token_ids.max()) >= facts.vocabulary):
        raise InvalidData(
            "token_out_of_range",
            f"token ids of {name} span {token_ids.min()} to {token_ids.max()}, expected 0 to {facts.vocabulary - 1}",
        )
    return token_ids


def _replay(
    data: bytes,
    sample_id: str,
    prompt_length: int,
    token_ids: Array,
    sampling: sample_pb2.SamplingParameters,
    facts: ModelFacts,
) -> Replay:
    replay = decode_replay(
        data,
        sample_id=sample_id,
        prompt_length=prompt_length,
        token_ids=token_ids,
        max_bytes=(prompt_length + len(token_ids)) * facts.replay_bytes_per_token,
    )
    if not facts.moe_layers:
        # Captured from a router that the trainer does not replay.
        replay = replace(replay, routing=None)
    elif replay.routing is None:
        raise InvalidData(
            "routing_missing", f"replay of {sample_id} has no routing, expected it for {facts.moe_layers} layers"
        )
    # As the sample was drawn: the configuration may have changed since.
    if replay.candidates is None and (sampling.top_k > 0 or 0 < sampling.top_p < 1):
        raise InvalidData("candidates_missing", f"replay of {sample_id} has no candidates, but sampling truncates")
    check_model_bounds(
        replay,
        moe_layers=facts.moe_layers,
        experts_per_token=facts.experts_per_token,
        experts=facts.experts,
        vocabulary=facts.vocabulary,
    )
    return replay
