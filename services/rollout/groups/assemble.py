"""Samples and their prompt as the message to the reward service."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from trivet.v1 import sample_pb2, tensor_pb2

from services.common.errors import InvalidData
from services.common.transport.blobs import BlobStore
from services.common.wire.group import sample_id
from services.common.wire.replay_data import encode_replay
from services.rollout.engine.protocol import EngineSample

FINISH_REASONS = {"stop": sample_pb2.FINISH_REASON_STOP, "length": sample_pb2.FINISH_REASON_LENGTH}


@dataclass(frozen=True)
class SampledGroup:
    """`replays` holds each sample's serialized ReplayData, empty where nothing is replayed (evaluation)."""

    group: sample_pb2.Group
    replays: list[bytes]


def sample_ids(prompt: sample_pb2.Prompt) -> list[str]:
    """In the order of the group."""
    return [sample_id(prompt, index) for index in range(prompt.group_size)]


def assemble(
    prompt: sample_pb2.Prompt,
    samples: Sequence[EngineSample],
    *,
    rollout_id: str,
    code: str,
    config: str,
    seconds: float,
) -> SampledGroup:
    """Raises InvalidData("logprob_not_finite") for samples that cannot be trained on."""
    group = sample_pb2.Group(prompt=prompt, rollout_id=rollout_id, sampling_seconds=seconds)
    replays = []
    for index, (own_id, sample) in enumerate(zip(sample_ids(prompt), samples, strict=True)):
        _check_finite(own_id, sample)
        group.samples.append(
            sample_pb2.Sample(
                sample_id=own_id,
                index=index,
                token_ids=sample.token_ids.tolist(),
                logprobs=sample.logprobs.tolist(),
                finish_reason=FINISH_REASONS[sample.finish_reason],
                text=sample.text,
                versions=[
                    sample_pb2.VersionSpan(version=span.version, start=span.start, end=span.end)
                    for span in sample.spans
                ],
            )
        )
        replays.append(encode_replay(own_id, sample.replay) if sample.replay is not None else b"")
    # More than one where weights arrived while the group was sampled: in the order of use.
    fingerprints = dict.fromkeys(span.fingerprint for sample in samples for span in sample.spans)
    group.lineage.CopyFrom(
        sample_pb2.Lineage(data=prompt.lineage.data, code=code, config=config, weights="+".join(fingerprints))
    )
    return SampledGroup(group, replays)


def store_replays(sampled: SampledGroup, blobs: BlobStore) -> sample_pb2.Group:
    """Puts each replay into the store and its reference into the sample. Raises what BlobStore.put raises."""
    for sample, replay in zip(sampled.group.samples, sampled.replays, strict=True):
        if replay:
            reference: tensor_pb2.BlobReference = blobs.put(sample.sample_id, replay)
            sample.replay.CopyFrom(reference)
    return sampled.group


def _check_finite(own_id: str, sample: EngineSample) -> None:
    if not np.isfinite(sample.logprobs).all():
        position = int(np.flatnonzero(~np.isfinite(sample.logprobs))[0])
        raise InvalidData(
            "logprob_not_finite",
            f"logprobs[{position}] of {own_id} is {sample.logprobs[position]}, expected a finite number",
        )
