"""Log-probabilities of tokens over the candidate sets they were sampled from.

    lp(token) = z(token) − logsumexp(z at the candidate ids),   z = logits / temperature

Where there is a candidate set only its rows of the output matrix are read; where the whole vocabulary was allowed
the matrix is read in blocks. Either way nothing of size [tokens, vocabulary] exists. Sums run in float32, or float64
for float64 input.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from services.common.errors import InvalidData
from services.trainer.batch.packing import PackedCandidates
from services.trainer.model.ragged import bag_sums, blocks, pair_dots, row_of_pair, sum_dtype, transposed_bag_sums


@dataclass(frozen=True)
class LogitRule:
    """How a family turns h·W into logits: times `multiplier`, then softcap·tanh(·/softcap)."""

    multiplier: float = 1.0
    softcap: float | None = None

    def apply(self, raw: Tensor) -> Tensor:
        logits = raw * self.multiplier if self.multiplier != 1.0 else raw
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap is not None else logits

    def derivative(self, logits: Tensor) -> Tensor | float:
        """d logits / d raw, at the values that `apply` returned."""
        if self.softcap is None:
            return self.multiplier
        return (1 - (logits / self.softcap).square()) * self.multiplier


@dataclass(frozen=True)
class LogProbQuery:
    """Which log-probs are asked for. Without `candidates` each is over the whole vocabulary.

    `entropy_gradient` makes the entropies differentiable; otherwise they are detached and cost backward nothing.
    """

    targets: Int[Tensor, "tokens"]
    temperatures: Float[Tensor, "tokens"]
    candidates: PackedCandidates | None
    rule: LogitRule = LogitRule()
    entropy_gradient: bool = False

    def rows(self, chosen: Int[Tensor, "chosen"], candidates: PackedCandidates | None) -> "LogProbQuery":
        return replace(
            self, targets=self.targets[chosen], temperatures=self.temperatures[chosen], candidates=candidates
        )


class LogProbHead(nn.Module):
    """The output matrix as the log-probs see it.

    It holds the very parameters of the model's lm_head, so that ZeRO-3 gathers them for this module's forward and
    backward.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(
        self, hidden: Float[Tensor, "tokens hidden"], query: LogProbQuery
    ) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
        return token_logprobs(hidden, self.weight, self.bias, query)


def token_logprobs(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocabulary hidden"],
    bias: Float[Tensor, "vocabulary"] | None,
    query: LogProbQuery,
) -> tuple[Float[Tensor, "tokens"], Float[Tensor, "tokens"]]:
    """Log-prob of each target, and the entropy of the distribution it was drawn from, in nats.

    Raises InvalidData for an id outside the vocabulary or a target outside its candidate set.
    """
    _check_ids(query.targets, weight.shape[0], "targets")
    candidates = query.candidates
    query = replace(query, temperatures=query.temperatures.to(sum_dtype(hidden)))
    if candidates is None:
        return _apply(_WholeVocabulary, hidden, weight, bias, query)
    _check_ids(candidates.token_ids, weight.shape[0], "candidates.token_ids")
    whole = candidates.counts == 0
    if not bool(whole.any()):
        return _apply(_CandidateSets, hidden, weight, bias, query)
    everywhere, restricted = whole.nonzero().squeeze(1), (~whole).nonzero().squeeze(1)
    kept = PackedCandidates(candidates.counts[restricted], candidates.token_ids)
    first = _apply(_WholeVocabulary, hidden[everywhere], weight, bias, query.rows(everywhere, None))
    if not len(restricted):
        return first
    second = _apply(_CandidateSets, hidden[restricted], weight, bias, query.rows(restricted, kept))
    order = torch.cat([everywhere, restricted]).argsort()
    return torch.cat([first[0], second[0]])[order], torch.cat([first[1], second[1]])[order]


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> tuple[Tensor, Tensor]:
    logprobs, entropies = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return logprobs, entropies


def _check_ids(ids: Tensor, vocabulary: int, field: str) -> None:
    if ids.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0 or high >= vocabulary:
        raise InvalidData("token_out_of_range", f"{field} span {low} to {high}, expected 0 to {vocabulary - 1}")


class _CandidateSets(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        query: LogProbQuery,
    ) -> tuple[Tensor, Tensor]:
        dtype = sum_dtype(hidden)
        targets, temperatures, rule = query.targets, query.temperatures, query.rule
        if query.candidates is None:
            raise ValueError("candidates are missing")
        counts, ids = query.candidates.counts, query.candidates.token_ids
        rows = row_of_pair(counts)
        chosen = ids == targets[rows]
        _check_chosen(chosen, counts, targets)
        raw = pair_dots(hidden, weight, counts, ids)
        if bias is not None:
            raw = raw + bias[ids].to(dtype)
        logits = rule.apply(raw)
        scaled = logits / temperatures[rows]
        top = torch.segment_reduce(scaled, "max", lengths=counts)
        total = torch.segment_reduce((scaled - top[rows]).exp(), "sum", lengths=counts)
        normalizer = top + total.log()
        log_probabilities = scaled - normalizer[rows]
        probabilities = log_probabilities.exp()
        # At most one candidate of a row is the chosen one, so the sum only picks it.
        logprobs = torch.segment_reduce(log_probabilities.where(chosen, 0), "sum", lengths=counts)
        entropies = -torch.segment_reduce(probabilities * log_probabilities, "sum", lengths=counts)
        slope = rule.derivative(logits) / temperatures[rows]
        slopes, entropy_slopes = (chosen.to(dtype) - probabilities) * slope, None
        if query.entropy_gradient:
            entropy_slopes = _entropy_slopes(log_probabilities, entropies[rows]) * slope
        else:
            ctx.mark_non_differentiable(entropies)
        ctx.save_for_backward(hidden, weight, bias, ids, counts, slopes, entropy_slopes)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, counts, slopes, entropy_slopes = ctx.saved_tensors
        rows = row_of_pair(counts)
        coefficients = slopes * grad.to(slopes.dtype)[rows]
        if entropy_slopes is not None:
            coefficients += entropy_slopes * entropy_grad.to(slopes.dtype)[rows]
        for_hidden, for_weight, for_bias, _ = ctx.needs_input_grad
        grads = _Gradients(
            bag_sums(weight, counts, ids, coefficients) if for_hidden else None,
            transposed_bag_sums(hidden, counts, ids, coefficients, len(weight)) if for_weight else None,
            torch.zeros_like(bias, dtype=slopes.dtype).index_add_(0, ids, coefficients) if for_bias else None,
        )
        return (*grads.cast(hidden, weight, bias), None)


def _check_chosen(chosen: Tensor, counts: Tensor, targets: Tensor) -> None:
    found = torch.segment_reduce(chosen.to(torch.float32), "sum", lengths=counts)
    if not bool((found == 1).all()):
        position = int((found != 1).nonzero()[0])
        raise InvalidData(
            "token_outside_candidates",
            f"token {int(targets[position])} at packed position {position} is {int(found[position])} times among its "
            "candidates, expected once",
        )


class _WholeVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        query: LogProbQuery,
    ) -> tuple[Tensor, Tensor]:
        dtype = sum_dtype(hidden)
        targets, temperatures, rule = query.targets, query.temperatures, query.rule
        wide = hidden.to(dtype)
        top = torch.full((len(targets),), -torch.inf, dtype=dtype, device=hidden.device)
        total, weighted, picked = torch.zeros_like(top), torch.zeros_like(top), torch.zeros_like(top)
        for part in blocks(weight.shape[0], max(hidden.shape)):
            scaled = rule.apply(_raw(wide, weight, bias, part)) / temperatures[:, None]
            inside, column = _inside(targets, part)
            picked[inside] = scaled[inside, column]
            higher = torch.maximum(top, scaled.amax(1))
            # Running logsumexp, and Σ e^(z − top)·z for the entropy.
            shrink, exponentials = (top - higher).exp(), (scaled - higher[:, None]).exp()
            total = total * shrink + exponentials.sum(1)
            weighted = weighted * shrink + (exponentials * scaled).sum(1)
            top = higher
        normalizer = top + total.log()
        entropies = normalizer - weighted / total
        differentiable = entropies if query.entropy_gradient else None
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures, normalizer, differentiable)
        ctx.rule = rule
        if differentiable is None:
            ctx.mark_non_differentiable(entropies)
        return picked - normalizer, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperatures, normalizer, entropies = ctx.saved_tensors
        rule: LogitRule = ctx.rule
        dtype = normalizer.dtype
        wide, factor = hidden.to(dtype), (grad.to(dtype) / temperatures)[:, None]
        entropy_factor = (entropy_grad.to(dtype) / temperatures)[:, None]
        for_hidden, for_weight, for_bias, _ = ctx.needs_input_grad
        grads = _Gradients(
            torch.zeros_like(hidden, dtype=dtype) if for_hidden else None,
            torch.zeros_like(weight, dtype=dtype) if for_weight else None,
            torch.zeros_like(bias, dtype=dtype) if for_bias else None,
        )
        for part in blocks(weight.shape[0], max(hidden.shape)):
            logits = rule.apply(_raw(wide, weight, bias, part))
            log_probabilities = logits / temperatures[:, None] - normalizer[:, None]
            entropy_slopes = None
            if entropies is not None:
                entropy_slopes = _entropy_slopes(log_probabilities, entropies[:, None]) * entropy_factor
            slopes = log_probabilities.exp_().neg_()
            inside, column = _inside(targets, part)
            slopes[inside, column] += 1
            slopes *= factor
            if entropy_slopes is not None:
                slopes += entropy_slopes
            slopes *= rule.derivative(logits)
            if grads.hidden is not None:
                grads.hidden.addmm_(slopes, weight[part].to(dtype))
            if grads.weight is not None:
                torch.mm(slopes.t(), wide, out=grads.weight[part])
            if grads.bias is not None:
                grads.bias[part] = slopes.sum(0)
        return (*grads.cast(hidden, weight, bias), None)


def _entropy_slopes(log_probabilities: Tensor, entropies: Tensor) -> Tensor:
    """d entropy / d (logit / temperature) = −p·(log p + entropy)."""
    return -log_probabilities.exp() * (log_probabilities + entropies)


def _raw(wide: Tensor, weight: Tensor, bias: Tensor | None, part: slice) -> Tensor:
    raw = wide @ weight[part].to(wide.dtype).t()
    return raw if bias is None else raw + bias[part].to(wide.dtype)


def _inside(targets: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Rows whose target lies in the block, and its column there."""
    inside = ((targets >= part.start) & (targets < part.stop)).nonzero().squeeze(1)
    return inside, targets[inside] - part.start


@dataclass
class _Gradients:
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def cast(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = ((self.hidden, hidden), (self.weight, weight), (self.bias, bias))
        return tuple(grad.to(like.dtype) if grad is not None and like is not None else None for grad, like in pairs)
