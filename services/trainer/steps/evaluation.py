"""The policy on prompts that it is never trained on."""

import math
from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from trivet.v1 import sample_pb2

from services.common.errors import GaveUp

# Of one group.
MAX_REISSUES = 3


@dataclass
class Evaluation:
    """Collects the scored groups of one evaluation. A group that failed is counted and left out of the means."""

    evaluation_id: str
    success_reward: float
    # What was issued, by group id.
    expected: dict[str, sample_pb2.Prompt]
    # Issues a prompt.
    issue: Callable[[sample_pb2.Prompt], object]
    groups: dict[str, sample_pb2.ScoredGroup] = field(default_factory=dict)
    # By group id: an error's code, and its reason.
    failures: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return not self.missing

    @property
    def missing(self) -> set[str]:
        return self.expected.keys() - self.groups.keys() - self.failures.keys()

    def awaited(self, group_id: str) -> sample_pb2.Prompt | None:
        """What was issued under the id; None where nothing was, or its group has come."""
        return self.expected[group_id] if group_id in self.missing else None

    def add(self, scored: sample_pb2.ScoredGroup) -> None:
        """A group of another evaluation, or one that came before, is ignored."""
        group_id = scored.group.prompt.group_id
        if group_id in self.missing:
            self.groups[group_id] = scored

    def issue_again(self, group_id: str) -> bool:
        """True a few times; after that False, and the group stays missing."""
        again = sample_pb2.Prompt()
        again.CopyFrom(self.expected[group_id])
        if again.attempt >= MAX_REISSUES:
            return False
        again.attempt += 1
        self.issue(again)
        self.expected[group_id] = again
        return True

    def issue_vanished(self, alive: Container[str]) -> list[str]:
        """Has every missing group issued again that is not alive, and names them. One that is lost each time fails."""
        vanished = sorted(group_id for group_id in self.missing if group_id not in alive)
        for group_id in vanished:
            if not self.issue_again(group_id):
                reason = f"group {group_id} was lost {MAX_REISSUES + 1} times"
                self.fail(group_id, "vanished", reason, attempt=MAX_REISSUES)
        return vanished

    def fail(self, group_id: str, code: str, reason: str, *, attempt: int) -> None:
        """Ignored for an attempt that a later one has replaced."""
        if group_id in self.missing and attempt >= self.expected[group_id].attempt:
            self.failures[group_id] = code, reason

    def metrics(self) -> dict[str, float]:
        """Accuracy, its standard error over prompts, reward and length, for greedy and for sampled completions.

        Raises GaveUp when every group failed: another start would evaluate for nothing again.
        """
        if not self.groups:
            codes = Counter(code for code, _ in self.failures.values())
            listed = ", ".join(f"{count} × {code}" for code, count in codes.most_common())
            reason = next((reason for _, reason in self.failures.values()), "there were none")
            raise GaveUp(
                "evaluation_empty",
                f"all {len(self.failures)} groups of the evaluation failed ({listed}); the first because {reason}",
            )
        greedy = [scored for scored in self.groups.values() if scored.group.prompt.sampling.temperature == 0]
        sampled = [scored for scored in self.groups.values() if scored.group.prompt.sampling.temperature > 0]
        metrics = {"failures": float(len(self.failures))}
        for kind, groups in (("greedy", greedy), ("sampled", sampled)):
            if groups:
                metrics |= {f"{kind}_{name}": value for name, value in self._summary(groups).items()}
        return metrics

    def _summary(self, groups: list[sample_pb2.ScoredGroup]) -> dict[str, float]:
        per_prompt = [
            _mean([float(score.raw_reward >= self.success_reward) for score in scored.scores]) for scored in groups
        ]
        accuracy = _mean(per_prompt)
        variance = sum((value - accuracy) ** 2 for value in per_prompt) / max(1, len(per_prompt) - 1)
        return {
            "accuracy": accuracy,
            "accuracy_error": math.sqrt(variance / len(per_prompt)),
            "reward": _mean([score.reward for scored in groups for score in scored.scores]),
            "length": _mean([float(len(sample.token_ids)) for scored in groups for sample in scored.group.samples]),
        }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
