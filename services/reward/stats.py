"""What the service did since it started, for its status call; the same numbers go to Prometheus."""

from collections import deque

from trivet.v1 import sample_pb2

from services.reward import metrics

WINDOW_SAMPLES = 1_024


class RewardStats:
    def __init__(self) -> None:
        self.groups = self.samples = self.failures = self.cache_hits = self.running = 0
        self._recent = {
            "train": deque[float](maxlen=WINDOW_SAMPLES),
            "evaluation": deque[float](maxlen=WINDOW_SAMPLES),
        }

    @property
    def mean_reward(self) -> float:
        """Over the last training samples; 0 before the first."""
        return _mean(self._recent["train"])

    def started(self) -> None:
        self.running += 1
        metrics.RUNNING_GROUPS.set(self.running)

    def ended(self) -> None:
        self.running -= 1
        metrics.RUNNING_GROUPS.set(self.running)

    def scored(self, group: sample_pb2.ScoredGroup) -> None:
        self.groups += 1
        self.samples += len(group.scores)
        metrics.GROUPS.inc()
        metrics.SAMPLES.inc(len(group.scores))
        metrics.TOKENS.inc(sum(len(sample.token_ids) for sample in group.group.samples))
        evaluation = group.group.prompt.purpose == sample_pb2.PURPOSE_EVALUATION
        purpose = "evaluation" if evaluation else "train"
        self._recent[purpose].extend(score.reward for score in group.scores)
        for score in group.scores:
            metrics.SAMPLE_REWARD.labels(purpose).observe(score.reward)
        metrics.MEAN.labels(purpose).set(_mean(self._recent[purpose]))

    def failed(self, code: str) -> None:
        self.failures += 1
        metrics.FAILURES.labels(code).inc()

    def cache_hit(self) -> None:
        self.cache_hits += 1
        metrics.CACHE_HITS.inc()


def _mean(values: deque[float]) -> float:
    return sum(values) / len(values) if values else 0.0
