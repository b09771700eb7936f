"""What a rollout asks of an inference engine. A sample is everything the trainer needs to replay the draw."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from jaxtyping import Float32, Int32
from trivet.v1 import rollout_pb2, sample_pb2, weights_pb2

from services.common.errors import TrivetError, Unavailable
from services.common.wire.replay_data import Replay
from services.common.wire.tensors import Array
from services.rollout.engine.delivery import Delivery

FinishReason = Literal["stop", "length"]


class LoadFailed(TrivetError):
    """The version could not be loaded; the engine keeps the previous one."""


class EngineFailed(Unavailable):
    """The engine lost the samples it was drawing, and the prompt may be why. Retrying may help."""


class NotServed(Unavailable):
    """The engine cannot serve the prompt at present; the prompt itself is fine."""


@dataclass(frozen=True)
class WeightSpan:
    """Tokens [start, end) of a sample were drawn under these weights."""

    version: int
    fingerprint: str
    start: int
    end: int


@dataclass(frozen=True)
class EngineSample:
    """C sampled tokens after P prompt tokens.

    `logprobs` are those of the sampled tokens after temperature, top-k and top-p. `replay` has routing of P + C − 1
    rows (absent for a dense model) and C candidate sets (absent where nothing truncates); it is None where the caller
    did not ask for it.
    """

    token_ids: Int32[Array, "completion"]
    logprobs: Float32[Array, "completion"]
    finish_reason: FinishReason
    text: str
    spans: tuple[WeightSpan, ...]
    replay: Replay | None = None


class Engine(Protocol):
    async def launch(self) -> None:
        """Loads the model; takes seconds to minutes. Raises ConfigError for options that cannot work together,
        Unavailable where the engine does not start."""

    @property
    def weights(self) -> weights_pb2.WeightVersion:
        """The version that new tokens are drawn under."""

    @property
    def max_length(self) -> int:
        """Tokens of prompt and completion together."""

    @property
    def vocabulary(self) -> int:
        """Token ids run from 0 to vocabulary − 1."""

    @property
    def problem(self) -> str | None:
        """Why the engine cannot sample at present, or None."""

    async def wait_gave_up(self) -> str:
        """Returns, with the reason, only once the engine will not start again."""

    def refusal(self, sampling: sample_pb2.SamplingParameters, capture: bool) -> str | None:
        """Why these parameters cannot be sampled (and captured), or None."""

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        sampling: sample_pb2.SamplingParameters,
        sample_ids: Sequence[str],
        *,
        capture: bool,
    ) -> list[EngineSample]:
        """One sample for each id, in order. With a seed, sample i uses seed + i.

        Raises EngineFailed when the samples are lost, NotServed when they are because the engine is started again for
        another reason, InvalidData when the engine refuses the request.
        """

    async def load_weights(self, weights: weights_pb2.WeightVersion) -> None:
        """Raises LoadFailed; the previous weights then stay."""

    @property
    def identity(self) -> str:
        """Another one after each restart, which forgets the transfer group."""

    @property
    def devices(self) -> list[str]:
        """UUID of each worker's GPU, empty on CPUs."""

    async def join_transfer(self, request: rollout_pb2.JoinTransferRequest) -> None:
        """Raises LoadFailed when the group cannot be formed."""

    async def receive_weights(self, delivery: Delivery) -> None:
        """Loads a version out of the trainer's memory. Raises LoadFailed; the weights are then those before, or the
        newest that are on disk."""

    async def close(self) -> None:
        """Also ends a launch that is under way. What is being sampled is lost."""
