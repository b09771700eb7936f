"""Which prompts were issued, and which of them are trained, lost or under way. A part of the checkpoint."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import InvalidData


@dataclass
class Ledger:
    """Issues are numbered from 0. One that is neither outstanding, withheld nor lost has been trained, exactly once.

    At most (1 + max_staleness)·groups_per_step groups are outstanding: with B groups a step at version v, that makes
    (v + 1 + max_staleness)·B issued. What is outstanding is counted, not steps, so both may change between two starts.
    """

    groups_per_step: int
    max_staleness: int
    # The next issue.
    cursor: int = 0
    # Issue → attempt, for what was issued and not trained yet.
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

    def next_issues(self, count: int) -> dict[int, int]:
        """What `issue` would issue, with the attempt of each."""
        again = {issue: self.withheld[issue] + 1 for issue in sorted(self.withheld)[:count]}
        return again | dict.fromkeys(range(self.cursor, self.cursor + count - len(again)), 0)

    def issue(self) -> int:
        [(issue, attempt)] = self.next_issues(1).items()
        self.outstanding[issue] = attempt
        if self.withheld.pop(issue, None) is None:
            self.cursor += 1
        return issue

    def withhold(self, steps_left: int, sampled: Collection[int]) -> list[int]:
        """Takes back what is outstanding beyond the bound, as after a start with smaller steps, and returns it.

        Trained in smaller steps it would grow too old. What is `sampled` already stays first, then what was issued
        first.
        """
        ordered = sorted(self.outstanding, key=lambda issue: (issue not in sampled, issue))
        surplus = ordered[self._limit(steps_left) :]
        self.withheld |= {issue: self.outstanding.pop(issue) for issue in surplus}
        return surplus

    def reissue(self, issue: int) -> int:
        """The attempt that replaces a lost one."""
        self._expect_outstanding(issue)
        self.outstanding[issue] += 1
        return self.outstanding[issue]

    def is_outstanding(self, issue: int) -> bool:
        return issue in self.outstanding

    def train(self, issues: list[int]) -> None:
        for issue in issues:
            self._expect_outstanding(issue)
            del self.outstanding[issue]

    def lose(self, issue: int) -> None:
        """Given up for good; another prompt may take its place."""
        self._expect_outstanding(issue)
        del self.outstanding[issue]
        self.lost.add(issue)

    def dump(self) -> dict[str, Any]:
        return {
            "cursor": self.cursor,
            "outstanding": {str(issue): attempt for issue, attempt in sorted(self.outstanding.items())},
            "withheld": {str(issue): attempt for issue, attempt in sorted(self.withheld.items())},
            "lost": sorted(self.lost),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Raises InvalidData for a state that cannot be one."""
        cursor = int(state["cursor"])
        outstanding, withheld = (
            {int(issue): int(attempt) for issue, attempt in state.get(name, {}).items()}
            for name in ("outstanding", "withheld")
        )
        lost = {int(issue) for issue in state["lost"]}
        untrained = [*outstanding, *withheld, *lost]
        if len(set(untrained)) < len(untrained) or any(not 0 <= issue < cursor for issue in untrained):
            raise InvalidData("ledger_state", f"the ledger's issues do not fit its cursor ({cursor})")
        self.cursor, self.outstanding, self.withheld, self.lost = cursor, outstanding, withheld, lost

    def _limit(self, steps_left: int) -> int:
        return max(0, min(1 + self.max_staleness, steps_left)) * self.groups_per_step

    def _expect_outstanding(self, issue: int) -> None:
        if issue not in self.outstanding:
            raise InvalidData("not_outstanding", f"issue {issue} is not outstanding (cursor {self.cursor})")
