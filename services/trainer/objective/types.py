"""What the loss takes in, and the words of this package.

Glossary:
    step      all micro-batches of all ranks that share one optimizer update
    current   the policy that is trained; the only one that carries gradient
    old       the policy in the ratio's denominator: the sampler's, or the trainer's own before the step
    rollout   the policy as the sampler evaluated it
    reference the frozen policy that the KL term compares with

Tokens are the completion tokens of one micro-batch, packed; a sequence is never split over micro-batches. The names of
axes are listed in docs/architecture.md. All log-probabilities are of the sampled tokens, over the same candidate set,
at the sampler's temperature.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from services.trainer.objective.metrics import Metrics
from services.trainer.objective.segments import segment_lengths


@dataclass(frozen=True, eq=False)
class LossOutputs:
    """`loss` carries gradient and is this micro-batch's share of the step's loss: add shares up, never average them.

    Where the training engine averages gradients over ranks, multiply by the number of ranks.
    """

    loss: Float[Tensor, ""]
    metrics: Metrics


Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]
AGGREGATIONS: tuple[Aggregation, ...] = ("token_mean", "sequence_mean", "fixed_length")


@dataclass(frozen=True, eq=False)
class LossInputs:
    """One micro-batch, and the size of the step that it is a part of.

    Every loss is divided by the totals of the step, never of the micro-batch, so that the losses of a step's
    micro-batches, however it was split and over however many ranks, add up to the loss of the whole.

    Raises ValueError that names the field when a shape, a dtype, an id, a total or a number is not what it says here.
    """

    logprobs: Float[Tensor, "tokens"]
    old_logprobs: Float[Tensor, "tokens"]
    rollout_logprobs: Float[Tensor, "tokens"]
    reference_logprobs: Float[Tensor, "tokens"] | None
    sequence_ids: Int[Tensor, "tokens"]  # in 0..sequences-1, in any order; every sequence has a token
    advantages: Float[Tensor, "sequences"]
    kept: Bool[Tensor, "sequences"]  # False where the sequence mask drops the policy term
    total_tokens: int  # of the step
    total_sequences: int  # of the step
    max_length: int  # the most tokens that a sequence can have
    # True drops the policy term as `kept` False does: cut off, and so rewarded for what it never came to say. The
    # tokens stay in every denominator. Overlong filtering, DAPO, arXiv 2503.14476, section 3.4.
    truncated: Bool[Tensor, "sequences"] | None = None
    steps_applied: int | None = None  # optimizer steps before this one; a calibrated importance weight needs it
    # With gradient, for the entropy bonus: of the current policy over the candidate set, in nats.
    entropies: Float[Tensor, "tokens"] | None = None
    # For algorithms with a value head. Each value is of the state before its token; only `values` carries gradient.
    values: Float[Tensor, "tokens"] | None = None
    old_values: Float[Tensor, "tokens"] | None = None  # of the value head as it was when the returns were computed
    returns: Float[Tensor, "tokens"] | None = None
    gae_advantages: Float[Tensor, "tokens"] | None = None  # of each token; `advantages` are their means then

    def __post_init__(self) -> None:
        _check_shapes(self)
        _check_values(self)

    @property
    def sequences(self) -> int:
        return self.advantages.shape[0]

    @cached_property
    def lengths(self) -> Int[Tensor, "sequences"]:
        return segment_lengths(self.sequence_ids, self.sequences)

    def require(self, name: str, why: str) -> Tensor:
        """The optional field of that name. Raises ValueError that says `why` where it is None."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ValueError(f"{name} is missing, expected [tokens]: {why}")
        return value

    @property
    def token_advantages(self) -> Float[Tensor, "tokens"]:
        return self.advantages[self.sequence_ids]


def _check_shapes(inputs: LossInputs) -> None:
    for name in ("sequence_ids", "advantages"):
        shape = tuple(getattr(inputs, name).shape)
        if len(shape) != 1 or shape[0] == 0:
            raise ValueError(f"{name} has shape {shape}, expected one axis with at least one entry")
    tokens, sequences = inputs.sequence_ids.shape, inputs.advantages.shape
    # Half precision is refused: its rounding alone moves a ratio by several per cent.
    floats, ids, flags = (torch.float32, torch.float64), (torch.int64,), (torch.bool,)
    contract: dict[str, tuple[torch.Size, tuple[torch.dtype, ...]]] = {
        **dict.fromkeys(_numbers(inputs), (tokens, floats)),
        "sequence_ids": (tokens, ids),
        "advantages": (sequences, floats),
        "kept": (sequences, flags),
        **({} if inputs.truncated is None else {"truncated": (sequences, flags)}),
    }
    for name, (shape, dtypes) in contract.items():
        value: Tensor = getattr(inputs, name)
        if value.shape != shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {tuple(shape)}")
        if value.dtype not in dtypes:
            raise ValueError(f"{name} has dtype {value.dtype}, expected {' or '.join(map(str, dtypes))}")


def _check_values(inputs: LossInputs) -> None:
    """Waits for the device once for the numbers and once for the lengths, whatever the number of fields."""
    floats = _numbers(inputs) | {"advantages": inputs.advantages}
    finite = torch.stack([value.isfinite().all() for value in floats.values()])
    facts = torch.cat([finite.long(), torch.stack(inputs.sequence_ids.aminmax())]).tolist()
    lowest, highest = facts[-2:]
    for name, ok in zip(floats, facts[:-2], strict=True):
        if not ok:
            raise ValueError(f"{name} holds NaN or infinity, expected finite numbers")
    if lowest < 0 or highest >= inputs.sequences:
        raise ValueError(f"sequence_ids span {lowest}..{highest}, expected 0..{inputs.sequences - 1}")
    shortest, longest = torch.stack(inputs.lengths.aminmax()).tolist()
    if shortest == 0:
        raise ValueError(f"sequence_ids leave a sequence of {inputs.sequences} without a token, expected at least one")
    for name, total, least in (
        ("total_tokens", inputs.total_tokens, inputs.sequence_ids.shape[0]),
        ("total_sequences", inputs.total_sequences, inputs.sequences),
        ("max_length", inputs.max_length, longest),
    ):
        if total < least:
            raise ValueError(f"{name} is {total}, expected at least the {least} of this micro-batch")
    if inputs.steps_applied is not None and inputs.steps_applied < 0:
        raise ValueError(f"steps_applied is {inputs.steps_applied}, expected 0 or more")


def _numbers(inputs: LossInputs) -> dict[str, Tensor]:
    """The fields of one number a token that are there."""
    fields = {
        "logprobs": inputs.logprobs,
        "old_logprobs": inputs.old_logprobs,
        "rollout_logprobs": inputs.rollout_logprobs,
        "reference_logprobs": inputs.reference_logprobs,
        "entropies": inputs.entropies,
        "values": inputs.values,
        "old_values": inputs.old_values,
        "returns": inputs.returns,
        "gae_advantages": inputs.gae_advantages,
    }
    return {name: value for name, value in fields.items() if value is not None}
