from typing import Any

import grpc
from trivet.v1 import reward_pb2, reward_pb2_grpc, sample_pb2

from services.common.errors import InvalidData, TrivetError, Unavailable
from services.common.wire.text import readable
from services.reward.score import GroupScorer
from services.reward.stats import RewardStats

# They travel in a header, which HTTP/2 limits to 8 KiB.
DETAILS_CHARACTERS = 1_000


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Refuses with RESOURCE_EXHAUSTED rather than let calls pile up beyond `concurrent_groups`."""

    def __init__(
        self, scorer: GroupScorer, stats: RewardStats, *, reward_id: str, scorers: list[str], concurrent_groups: int
    ) -> None:
        self._scorer, self._stats = scorer, stats
        self._reward_id, self._scorers = reward_id, scorers
        self._free = concurrent_groups

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        if self._free == 0:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many groups at once; try again later")
        self._free -= 1
        try:
            outcome = await self._scorer.score(request.group)
        except InvalidData as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _details(error))
        except Unavailable as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, _details(error))
        finally:
            self._free += 1
        if isinstance(outcome, sample_pb2.ScoredGroup):
            return reward_pb2.ScoreResponse(scored=outcome)
        return reward_pb2.ScoreResponse(failure=outcome)

    async def GetStatus(
        self, request: reward_pb2.RewardServiceGetStatusRequest, context: Any
    ) -> reward_pb2.RewardServiceGetStatusResponse:
        del request, context
        return reward_pb2.RewardServiceGetStatusResponse(
            reward_id=self._reward_id,
            running_groups=self._stats.running,
            groups=self._stats.groups,
            samples=self._stats.samples,
            failures=self._stats.failures,
            cache_hits=self._stats.cache_hits,
            mean_reward=self._stats.mean_reward,
            scorers=self._scorers,
        )


def _details(error: TrivetError) -> str:
    return readable(f"{error.code}: {error}", DETAILS_CHARACTERS)
