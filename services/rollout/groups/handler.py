"""What a rollout makes of one prompt of the stream: a group, its replay data stored, or why there is none."""

import asyncio
from functools import partial

from trivet.v1 import sample_pb2

from services.common.errors import InvalidData
from services.common.logs import get_logger
from services.common.transport.blobs import BlobStore
from services.common.transport.consumer import Failed, Finished, GivenBack, Lost, Outcome
from services.common.transport.outages import Outages
from services.common.transport.streams import Entry
from services.rollout.engine import metrics
from services.rollout.engine.protocol import EngineFailed, NotServed
from services.rollout.groups.assemble import SampledGroup, store_replays
from services.rollout.groups.sampler import GroupSampler
from services.rollout.weights.follower import WeightFollower

MAX_DRAWS = 3

log = get_logger(__name__)


class PromptHandler:
    def __init__(self, sampler: GroupSampler, follower: WeightFollower, blobs: BlobStore, outages: Outages) -> None:
        self._sampler, self._follower, self._blobs, self._outages = sampler, follower, blobs, outages

    def is_ready(self) -> bool:
        return self._sampler.engine.problem is None and self._follower.problem is None

    async def __call__(self, entry: Entry[sample_pb2.Prompt]) -> Outcome[sample_pb2.Group]:
        try:
            sampled = await self._sample(entry)
            return Finished(
                await self._outages.ride_out(partial(asyncio.to_thread, store_replays, sampled, self._blobs))
            )
        except (InvalidData, EngineFailed, NotServed) as error:
            metrics.FAILURES.labels(error.code).inc()
            if isinstance(error, InvalidData):
                return Failed(error)
            return Lost(error) if isinstance(error, EngineFailed) else GivenBack(error)

    async def _sample(self, entry: Entry[sample_pb2.Prompt]) -> SampledGroup:
        """Raises NotServed if the engine does not get the weights that the prompt asks for."""
        prompt = entry.message
        for _ in range(MAX_DRAWS):
            await self._outages.ride_out(partial(self._follower.wait_for, prompt.min_version, entry.id))
            sampled = await self._sampler.sample(prompt)
            spans = (span.version for sample in sampled.group.samples for span in sample.versions)
            oldest = min(spans, default=prompt.min_version)
            if self._follower.serves(oldest, prompt.min_version, entry.id):
                return sampled
            # It was started again in between, under older weights.
            log.warning("drawn again", sampled=oldest, wanted=prompt.min_version)
        raise NotServed("weights_behind", f"samples were of version {oldest}, expected {prompt.min_version} or newer")
