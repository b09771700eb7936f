"""Which prompts were issued, and which of them are trained, lost or under way. A part of the checkpoint."""

from dataclasses import dataclass, field
from typing import Any

from services.common.errors import InvalidData


@dataclass
class Ledger:
    """Issues are numbered from 0. One that is neither outstanding nor lost has been trained, exactly once.

    With B groups a step at version v, at most (v + 1 + max_staleness)·B groups are issued, lost ones not counted.
    """

    groups_per_step: int
    max_staleness: int
    # The next issue.
    cursor: int = 0
    # Issue → attempt, for what was issued and not trained yet.
    outstanding: dict[int, int] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)

    @property
    def trained(self) -> int:
        return self.cursor - len(self.outstanding) - len(self.lost)

    def room(self, version: int) -> int:
        """How many groups may be issued now."""
        allowed = (version + 1 + self.max_staleness) * self.groups_per_step
        return max(0, allowed - (self.cursor - len(self.lost)))

    def issue(self) -> int:
        issue = self.cursor
        self.cursor += 1
        self.outstanding[issue] = 0
        return issue

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
            "lost": sorted(self.lost),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Raises InvalidData for a state that cannot be one."""
        cursor = int(state["cursor"])
        outstanding = {int(issue): int(attempt) for issue, attempt in state["outstanding"].items()}
        lost = {int(issue) for issue in state["lost"]}
        if outstanding.keys() & lost or any(not 0 <= issue < cursor for issue in outstanding.keys() | lost):
            raise InvalidData("ledger_state", f"the ledger's issues do not fit its cursor ({cursor})")
        self.cursor, self.outstanding, self.lost = cursor, outstanding, lost

    def _expect_outstanding(self, issue: int) -> None:
        if issue not in self.outstanding:
            raise InvalidData("not_outstanding", f"issue {issue} is not outstanding (cursor {self.cursor})")
