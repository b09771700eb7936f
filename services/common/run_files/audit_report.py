"""What an audit measured: the trainer's side writes it as JSON and the CLI reads it."""

from typing import Literal

from services.common.run_files.report import Part, Report

ReplayKind = Literal["routing", "candidates"]


class Mismatch(Part):
    """Sampler against trainer over every completion token, with some kinds of replay and without the others.

    Δ = trainer's log-prob − sampler's log-prob, in nats.
    """

    replayed: tuple[ReplayKind, ...]
    difference_mean: float
    difference_max: float
    # Of |Δ|, by level such as "0.99".
    difference_quantiles: dict[str, float]
    # Mean of exp(Δ).
    ratio_mean: float
    # KL(sampler ‖ trainer), k3 of http://joschu.net/blog/kl-approx.html: mean of exp(Δ) − 1 − Δ.
    mismatch_kl: float
    # Where |Δ| is largest.
    worst_sample: str
    worst_position: int
    # For each MoE layer the share of positions where the live choice is the captured one; empty for a dense model.
    agreement: tuple[float, ...]


class CandidateFacts(Part):
    """`inside` of `positions` sampled tokens are in their own candidate set."""

    positions: int
    inside: int
    size_min: int
    size_mean: float
    size_max: int
    # At how many positions the trainer's probabilities over the set were summed, and the largest |sum − 1| among them.
    summed_positions: int
    sum_error_max: float
    # The trainer's probability of the set in the whole vocabulary: how far off a ratio without replay must be.
    mass_mean: float
    mass_min: float


class Refusal(Part):
    """A group that the trainer would not train on."""

    group_id: str
    code: str
    reason: str


class AuditReport(Report):
    KIND = "an audit's report"

    run: str
    model_type: str
    dtype: Literal["float32", "bfloat16"]
    rollout_id: str
    weights_version: int
    weights_fingerprint: str
    weights_path: str
    samples: int
    tokens: int
    # Sampled, but under other weights: a version arrived meanwhile.
    groups_left_out: int
    # The kinds of replay that the run's configuration leaves on and its data holds: the row that training will see.
    configured: tuple[ReplayKind, ...]
    rows: tuple[Mismatch, ...]
    candidates: CandidateFacts | None
    refused: tuple[Refusal, ...]

    def row(self, *replayed: ReplayKind) -> Mismatch:
        """Raises KeyError where the model or the sampling has no such kind of replay."""
        for row in self.rows:
            if set(row.replayed) == set(replayed):
                return row
        raise KeyError(f"no row with replay of {list(replayed)}, expected one of {[row.replayed for row in self.rows]}")
