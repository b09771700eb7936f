"""Groups requested from a rollout directly, not through the streams."""

import json
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

import grpc
from trivet.v1 import rollout_pb2, rollout_pb2_grpc, sample_pb2

from services.common.config import Config
from services.common.errors import InvalidData, Unavailable
from services.common.run_files.audit_report import Refusal
from services.common.serving.server import MAX_MESSAGE_BYTES
from services.trainer.batch.groups import check_scored_group, decode_group
from services.trainer.batch.model_facts import ModelFacts
from services.trainer.batch.samples import TrainSample
from services.trainer.data.prompts import PromptData
from services.trainer.steps.issuer import Issuer

STATUS_SECONDS = 20.0
CALLS_AT_A_TIME = 8
# A rollout that reloads its engine, or serves other callers, is asked again.
_RETRY = {
    "methodConfig": [
        {
            "name": [{"service": "trivet.v1.RolloutService"}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.5s",
                "maxBackoff": "4s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
            },
        }
    ]
}


@dataclass(frozen=True)
class Sampled:
    """Groups that were drawn entirely under one and the same weights."""

    rollout_id: str
    version: int
    fingerprint: str
    responses: tuple[rollout_pb2.GenerateResponse, ...]
    left_out: int


def audit_prompts(config: Config, data: PromptData, samples: int) -> list[sample_pb2.Prompt]:
    """As many groups of the training split as hold `samples` samples, under ids that no run uses."""
    issuer, audit = Issuer(config, data), uuid.uuid4().hex[:8]
    prompts = []
    for request in range(-(-samples // config.sampling.group_size)):
        prompt = issuer.training_prompt(request, attempt=0, min_version=0)
        prompt.group_id = f"audit-{audit}-{request}"
        prompts.append(prompt)
    return prompts


class RolloutClient:
    """Raises InvalidData where the rollout refuses, Unavailable where it cannot be reached or fails."""

    def __init__(self, address: str, token: str | None) -> None:
        self._address = address
        self._metadata = (("authorization", f"Bearer {token}"),) if token else None
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.service_config", json.dumps(_RETRY)),
        ]
        self._channel = grpc.insecure_channel(address, options=options)
        self._stub = rollout_pb2_grpc.RolloutServiceStub(self._channel)

    def status(self) -> rollout_pb2.RolloutServiceGetStatusResponse:
        request = rollout_pb2.RolloutServiceGetStatusRequest()
        try:
            return self._stub.GetStatus(request, metadata=self._metadata, timeout=STATUS_SECONDS)
        except grpc.RpcError as error:
            raise self._failure(error) from error

    def generate(self, prompt: sample_pb2.Prompt, timeout_seconds: float) -> rollout_pb2.GenerateResponse:
        request = rollout_pb2.GenerateRequest(prompt=prompt)
        try:
            response = self._stub.Generate(request, metadata=self._metadata, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise self._failure(error) from error
        if response.group.prompt != prompt:
            raise InvalidData(
                "prompt_mismatch", f"rollout at {self._address} answered another prompt than {prompt.group_id}"
            )
        return response

    def close(self) -> None:
        self._channel.close()

    def _failure(self, error: grpc.RpcError) -> InvalidData | Unavailable:
        # What a stub raises is both.
        call = cast(grpc.Call, error)
        code = call.code()
        reason = f"rollout at {self._address}: {code.name.lower()}: {call.details()}"
        if code in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}:
            return InvalidData("rollout_refused", reason)
        return Unavailable("rollout_unavailable", reason)


def sample(client: RolloutClient, prompts: Sequence[sample_pb2.Prompt], timeout_seconds: float) -> Sampled:
    """Weights may arrive meanwhile: the version that drew most groups counts, the other groups are left out.

    Raises as RolloutClient does, and Unavailable("weights_moved") when no group was drawn under one version alone.
    """
    with ThreadPoolExecutor(CALLS_AT_A_TIME) as pool:
        responses = list(pool.map(lambda prompt: client.generate(prompt, timeout_seconds), prompts))
    drawn = Counter(weights for response in responses if (weights := _weights(response)) is not None)
    if not drawn:
        raise Unavailable("weights_moved", f"each of the {len(responses)} groups was drawn under several versions")
    chosen = drawn.most_common(1)[0][0]
    kept = tuple(response for response in responses if _weights(response) == chosen)
    return Sampled(kept[0].group.rollout_id, *chosen, kept, len(responses) - len(kept))


def _weights(response: rollout_pb2.GenerateResponse) -> tuple[int, str] | None:
    """Version and fingerprint; None for more than one."""
    versions = {span.version for sample in response.group.samples for span in sample.versions}
    fingerprint = response.group.lineage.weights
    return (versions.pop(), fingerprint) if len(versions) == 1 and "+" not in fingerprint else None


def usable_samples(
    responses: Sequence[rollout_pb2.GenerateResponse], facts: ModelFacts
) -> tuple[list[TrainSample], list[Refusal]]:
    """The groups as the trainer would take them in, and those that it would refuse."""
    samples: list[TrainSample] = []
    refused = []
    for response in responses:
        group = response.group
        scored = sample_pb2.ScoredGroup(group=group, scores=[sample_pb2.Score()] * len(group.samples))
        try:
            check_scored_group(scored)
            samples += decode_group(scored, response.replay, facts)
        except InvalidData as error:
            refused.append(Refusal(group_id=group.prompt.group_id, code=error.code, reason=str(error)))
    return samples, refused
