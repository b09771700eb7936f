"""Which prompts were issued, and which of them are trained, lost or under way. A part of the checkpoint."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import InvalidData


@dataclass
class Ledger:
    """Requests are numbered from 0. One that is neither outstanding, withheld nor lost has been trained, exactly once.

    At most (1 + max_staleness)·groups_per_step groups are outstanding: with B groups a step at version v, that makes
    (v + 1 + max_staleness)·B issued. What is outstanding is counted, not steps, so both may change between two starts.
    """

    groups_per_step: int
    max_staleness: int
    # The next request.
    cursor: int = 0
    # Request → attempt, for what was issued and not trained yet.
    outstanding: dict[int, int] = field(default_factory=dict)
    # Likewise, for what was taken back untrained: issued again before anything new.
    withheld: dict[int, int] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)

    @property
    def trained(self) -> int:
        return self.cursor - len(self.outstanding) - len(self.withheld) - len(self.lost)

    def room(self, steps_left: int) -> int:
        """How many groups may be issued now: by the staleness bound, and by what the rest of the run can train."""
        return max(0, self._limit(steps_left) - len(self.outstanding))

    def next_requests(self, count: int) -> dict[int, int]:
        """What `issue` would issue, with the attempt of each."""
        again = {request: self.withheld[request] + 1 for request in sorted(self.withheld)[:count]}
        return again | dict.fromkeys(range(self.cursor, self.cursor + count - len(again)), 0)

    def issue(self) -> int:
        [(request, attempt)] = self.next_requests(1).items()
        self.outstanding[request] = attempt
        if self.withheld.pop(request, None) is None:
            self.cursor += 1
        return request

    def withhold(self, steps_left: int, sampled: Collection[int]) -> list[int]:
        """Takes back what is outstanding beyond the bound, as after a start with smaller steps, and returns it.

        Trained in smaller steps it would grow too old. What is `sampled` already stays first, then what was issued
        first.
        """
        ordered = sorted(self.outstanding, key=lambda request: (request not in sampled, request))
        surplus = ordered[self._limit(steps_left) :]
        self.withheld |= {request: self.outstanding.pop(request) for request in surplus}
        return surplus

    def next_attempt(self, request: int, failed: int = 0) -> int:
        """What `reissue` would issue: later than the attempt that failed, which may have been made after the checkpoint
        that was resumed from.
        """
        self._expect_outstanding(request)
        return max(self.outstanding[request], failed) + 1

    def reissue(self, request: int, failed: int = 0) -> int:
        """The attempt that replaces a lost one."""
        self.outstanding[request] = self.next_attempt(request, failed)
        return self.outstanding[request]

    def awaits(self, request: int, attempt: int) -> bool:
        """Whether it matters what has become of the attempt: not where a later one has replaced it, or the request is
        trained, lost or withheld.
        """
        return self.outstanding.get(request, attempt + 1) <= attempt

    def is_outstanding(self, request: int) -> bool:
        return request in self.outstanding

    def is_over(self, request: int) -> bool:
        """Nothing that was issued of it so far is waited for: it is trained, lost or withheld."""
        return request < self.cursor and request not in self.outstanding

    def train(self, requests: list[int]) -> None:
        for request in requests:
            self._expect_outstanding(request)
            del self.outstanding[request]

    def lose(self, request: int) -> None:
        """Given up for good; another prompt may take its place."""
        self._expect_outstanding(request)
        del self.outstanding[request]
        self.lost.add(request)

    def dump(self) -> dict[str, Any]:
        return {
            "cursor": self.cursor,
            "outstanding": {str(request): attempt for request, attempt in sorted(self.outstanding.items())},
            "withheld": {str(request): attempt for request, attempt in sorted(self.withheld.items())},
            "lost": sorted(self.lost),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Raises InvalidData for a state that cannot be one."""
        cursor = int(state["cursor"])
        outstanding, withheld = (
            {int(request): int(attempt) for request, attempt in state.get(name, {}).items()}
            for name in ("outstanding", "withheld")
        )
        lost = {int(request) for request in state["lost"]}
        untrained = [*outstanding, *withheld, *lost]
        if len(set(untrained)) < len(untrained) or any(not 0 <= request < cursor for request in untrained):
            raise InvalidData("ledger_state", f"the ledger's requests do not fit its cursor ({cursor})")
        self.cursor, self.outstanding, self.withheld, self.lost = cursor, outstanding, withheld, lost

    def _limit(self, steps_left: int) -> int:
        return max(0, min(1 + self.max_staleness, steps_left)) * self.groups_per_step

    def _expect_outstanding(self, request: int) -> None:
        if request not in self.outstanding:
            raise InvalidData("not_outstanding", f"request {request} is not outstanding (cursor {self.cursor})")
