"""What the calculator takes for given. Nothing here was measured but MeasuredBytes."""

from dataclasses import dataclass

from services.common.config import Config


@dataclass(frozen=True)
class Gpu:
    """Of the maker's data sheet: bytes, bytes a second, dense bf16 FLOPs a second."""

    name: str
    memory: float
    bandwidth: float
    flops: float


H100 = Gpu("H100 SXM", 80e9, 3.35e12, 989e12)
H200 = Gpu("H200 SXM", 141e9, 4.8e12, 989e12)
GPUS = {"H100": H100, "H200": H200}


@dataclass(frozen=True)
class Assumptions:
    """Shares are of the data sheet's figure; the rest is in bytes a second."""

    training_mfu: float = 0.35
    sampling_mfu: float = 0.35
    bandwidth_share: float = 0.6
    memory_share: float = 0.9
    # Between two GPUs of different nodes: one 400 Gbit/s adapter each.
    interconnect: float = 50e9
    # Between GPUs of a node.
    nvlink: float = 300e9
    host_copy: float = 25e9
    disk_write: float = 2e9
    # All readers together.
    disk_read: float = 8e9
    # A file read a second time, or hashed.
    page_cache: float = 8e9
    # One Redis: its commands run on one thread.
    redis: float = 1e9
    # Bytes that one Redis may hold; rewriting its file wants as much again.
    redis_memory: float = 16e9
    gpus_per_node: int = 8


@dataclass(frozen=True)
class MeasuredBytes:
    """From `python -m benchmarks.measure_bytes`, at P + C = 8192.

    The routing shares are of raw bytes with uniform choices, by the number of experts. A candidate set of mean size m
    takes `candidate_base` + m·`candidate_id` bytes.
    """

    routing_share_128: float
    routing_share_256: float
    prompt_token: float
    completion_token: float
    candidate_base: float
    candidate_id: float

    def routing_share(self, experts: int) -> float:
        return self.routing_share_128 if experts <= 128 else self.routing_share_256


@dataclass(frozen=True)
class Workload:
    """Tokens are means, but for `longest` (max_tokens). Samples of a step: groups · group_size."""

    groups: int
    group_size: int
    prompt: int
    completion: int
    longest: int
    candidates: float
    max_staleness: int
    checkpoint_every: int

    @property
    def samples(self) -> int:
        return self.groups * self.group_size

    @property
    def length(self) -> int:
        return self.prompt + self.completion

    @property
    def tokens(self) -> int:
        """Of a step, as trained: prompt and completion of each sample."""
        return self.samples * self.length

    @classmethod
    def of(cls, config: Config, *, prompt: int, completion: int, candidates: float) -> "Workload":
        """`candidates` is the mean size of a candidate set; it counts only where sampling truncates."""
        return cls(
            groups=config.trainer.groups_per_step,
            group_size=config.sampling.group_size,
            prompt=prompt,
            completion=completion,
            longest=config.sampling.max_tokens,
            candidates=candidates if config.sampling.truncates else 0.0,
            max_staleness=config.trainer.max_staleness,
            checkpoint_every=config.trainer.checkpoint_every,
        )
