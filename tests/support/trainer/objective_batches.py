"""Whole steps with random numbers, and their division into micro-batches."""

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from hypothesis import strategies as st

from services.trainer.objective import (
    ALGORITHMS,
    Algorithm,
    Calibration,
    ImportanceCorrection,
    KlPenalty,
    LossInputs,
    Objective,
    find_algorithm,
)
from services.trainer.objective.importance import IMPORTANCE_MODES
from services.trainer.objective.kl import KL_ESTIMATORS

REWARD_ALGORITHMS = sorted(name for name in ALGORITHMS if isinstance(find_algorithm(name), Algorithm))
LEAVES = ("logprobs", "values", "entropies")
PER_TOKEN = (
    *LEAVES,
    "old_logprobs",
    "rollout_logprobs",
    "reference_logprobs",
    "old_values",
    "returns",
    "gae_advantages",
)


def step(lengths=(3, 1, 4, 2), seed=0, max_length=8):
    """A step in one micro-batch: policies about 0.3 nats apart, sequence 1 masked, sequence 2 truncated."""
    generator = torch.Generator().manual_seed(seed)

    def noise(size, scale):
        return scale * torch.randn(size, generator=generator, dtype=torch.float64)

    tokens, sequences = sum(lengths), len(lengths)
    rollout = -noise(tokens, 1.0).abs() - 0.5
    kept = torch.rand(sequences, generator=generator) > 0.3
    kept[min(1, sequences - 1)] = False
    values = noise(tokens, 1.0)
    return LossInputs(
        logprobs=(rollout + noise(tokens, 0.3)).requires_grad_(),
        old_logprobs=rollout + noise(tokens, 0.2),
        rollout_logprobs=rollout,
        reference_logprobs=rollout + noise(tokens, 0.4),
        sequence_ids=torch.repeat_interleave(torch.arange(sequences), torch.tensor(lengths)),
        advantages=noise(sequences, 1.0),
        truncated=torch.arange(sequences) % 3 == 2,
        steps_applied=7,
        values=values.requires_grad_(),
        old_values=values.detach() + noise(tokens, 0.3),
        returns=values.detach() + noise(tokens, 0.5),
        gae_advantages=noise(tokens, 1.0),
        entropies=noise(tokens, 1.0).abs().requires_grad_(),
        kept=kept,
        total_tokens=tokens,
        total_sequences=sequences,
        max_length=max_length,
    )


@dataclass(frozen=True)
class MicroBatch:
    inputs: LossInputs
    tokens: torch.Tensor  # positions in the step


def select(inputs, sequences):
    """The micro-batch of those sequences, in that order."""
    tokens = torch.cat([torch.nonzero(inputs.sequence_ids == sequence)[:, 0] for sequence in sequences])
    lengths = inputs.lengths[sequences]
    per_token = {name: getattr(inputs, name).detach()[tokens] for name in PER_TOKEN}
    per_token |= {name: per_token[name].requires_grad_() for name in LEAVES}
    chosen = replace(
        inputs,
        **per_token,
        sequence_ids=torch.repeat_interleave(torch.arange(len(sequences)), lengths),
        advantages=inputs.advantages[sequences],
        kept=inputs.kept[sequences],
        truncated=inputs.truncated[sequences],
    )
    return MicroBatch(chosen, tokens)


def split(inputs, order, sizes):
    """Micro-batches of `sizes` sequences, taken in `order`."""
    ends = list(accumulate(sizes))
    return [select(inputs, list(order[end - size : end])) for size, end in zip(sizes, ends, strict=True)]


@st.composite
def steps(draw):
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    return step(tuple(lengths), seed=draw(st.integers(0, 2**16)))


@st.composite
def divided_steps(draw):
    inputs = draw(steps())
    order = draw(st.permutations(range(inputs.sequences)))
    sizes, left = [], inputs.sequences
    while left:
        sizes.append(draw(st.integers(1, left)))
        left -= sizes[-1]
    return inputs, split(inputs, order, sizes)


@st.composite
def objectives(draw):
    algorithm = find_algorithm(draw(st.sampled_from(REWARD_ALGORITHMS)))
    mode = draw(st.sampled_from(IMPORTANCE_MODES))
    calibration = draw(st.sampled_from([None, Calibration(1.5, 10)])) if mode != "none" else None
    return Objective(
        algorithm.override(
            draw(st.sampled_from([None, "token_mean", "sequence_mean", "fixed_length"])),
            entropy_coef=draw(st.sampled_from([None, 0.1])),
        ),
        ImportanceCorrection(mode, clip_min=0.5, cap=1.5, calibration=calibration),
        KlPenalty(draw(st.sampled_from(KL_ESTIMATORS)), coef=0.3),
    )


def objective(name="grpo", *, importance="none", kl=None, **overrides):
    return Objective(find_algorithm(name).override(**overrides), ImportanceCorrection(importance), kl)
