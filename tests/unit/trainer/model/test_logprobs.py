from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.common.errors import InvalidData
from services.trainer.batch.packing import PackedCandidates
from services.trainer.model import ragged
from services.trainer.model.logprobs import LogitRule, LogProbQuery, token_logprobs

TOKENS, VOCABULARY, HIDDEN = 13, 37, 6
RULES = [LogitRule(), LogitRule(multiplier=0.3), LogitRule(softcap=2.0), LogitRule(multiplier=1.7, softcap=3.0)]


@pytest.fixture(params=[2**22, 50], ids=["one block", "small blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged, "BLOCK_ELEMENTS", request.param)


def make(seed: int = 0, *, bias: bool = True, whole: tuple[int, ...] = ()) -> tuple[list[Tensor | None], LogProbQuery]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64, requires_grad=True)
    offsets = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64, requires_grad=True) if bias else None
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    temperatures = torch.rand(TOKENS, generator=generator).double() + 0.5
    sets = []
    for row, target in enumerate(targets):
        size = 0 if row in whole else int(torch.randint(1, 9, (1,), generator=generator))
        others = torch.randperm(VOCABULARY, generator=generator)
        sets.append(torch.cat([target[None], others[others != target]])[:size])
    counts = torch.tensor([len(ids) for ids in sets])
    return [hidden, weight, offsets], LogProbQuery(targets, temperatures, PackedCandidates(counts, torch.cat(sets)))


def dense(parameters: list[Tensor | None], query: LogProbQuery) -> tuple[Tensor, Tensor]:
    hidden, weight, bias = parameters
    assert hidden is not None
    assert weight is not None
    raw = hidden @ weight.t() + (0 if bias is None else bias)
    scaled = query.rule.apply(raw) / query.temperatures[:, None]
    if query.candidates is not None:
        allowed = torch.zeros(raw.shape, dtype=torch.bool)
        for row, ids in enumerate(query.candidates.token_ids.split(query.candidates.counts.tolist())):
            allowed[row, ids if len(ids) else slice(None)] = True
        scaled = scaled.masked_fill(~allowed, -torch.inf)
    distribution = torch.distributions.Categorical(logits=scaled)
    return distribution.log_prob(query.targets), distribution.entropy()


def gradients(values: Tensor, parameters: list[Tensor | None]) -> list[Tensor]:
    wanted = [parameter for parameter in parameters if parameter is not None]
    weights = torch.linspace(-1, 2, len(values), dtype=values.dtype)
    return list(torch.autograd.grad((values * weights).sum(), wanted))


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("kind", ["candidates", "whole vocabulary", "mixed"])
def test_equals_the_dense_computation_in_value_and_gradient(kind: str, bias: bool, rule: LogitRule) -> None:
    parameters, made = make(bias=bias, whole=(0, 5, 6) if kind == "mixed" else ())
    candidates = None if kind == "whole vocabulary" else made.candidates
    query = LogProbQuery(made.targets, made.temperatures, candidates, rule)
    values, entropies = token_logprobs(*parameters, query)
    expected, expected_entropies = dense(parameters, query)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(entropies, expected_entropies, rtol=0, atol=1e-10)
    assert not entropies.requires_grad
    for ours, theirs in zip(gradients(values, parameters), gradients(expected, parameters), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("kind", ["candidates", "whole vocabulary", "mixed"])
def test_gradients_of_the_entropy_equal_the_dense_ones(kind: str, bias: bool, rule: LogitRule) -> None:
    parameters, made = make(bias=bias, whole=(0, 5, 6) if kind == "mixed" else ())
    candidates = None if kind == "whole vocabulary" else made.candidates
    query = LogProbQuery(made.targets, made.temperatures, candidates, rule, entropy_gradient=True)
    # The entropy's alone, on top of the log-prob's, and the log-prob's alone.
    for of_values, of_entropies in [(0.0, 1.0), (1.0, -0.3), (1.0, 0.0)]:
        values, entropies = token_logprobs(*parameters, query)
        expected, expected_entropies = dense(parameters, query)[0], dense_entropies(parameters, query)
        torch.testing.assert_close(entropies, expected_entropies, rtol=0, atol=1e-10)
        ours = gradients(of_values * values + of_entropies * entropies.square(), parameters)
        theirs = gradients(of_values * expected + of_entropies * expected_entropies.square(), parameters)
        for left, right in zip(ours, theirs, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=1e-10)


def dense_entropies(parameters: list[Tensor | None], query: LogProbQuery) -> Tensor:
    """Row by row from the definition: Categorical clamps the log-probs of masked entries, and with them gradients."""
    hidden, weight, bias = parameters
    assert hidden is not None
    assert weight is not None
    raw = hidden @ weight.t() + (0 if bias is None else bias)
    scaled = query.rule.apply(raw) / query.temperatures[:, None]
    sets = [slice(None)] * len(scaled) if query.candidates is None else candidates_of(query.candidates)
    logs = [row[ids].log_softmax(0) for row, ids in zip(scaled, sets, strict=True)]
    return torch.stack([-(log.exp() * log).sum() for log in logs])


def candidates_of(candidates: PackedCandidates) -> list[Tensor | slice]:
    return [ids if len(ids) else slice(None) for ids in candidates.token_ids.split(candidates.counts.tolist())]


def test_rows_that_all_mean_the_whole_vocabulary_equal_no_candidates() -> None:
    parameters, made = make(whole=tuple(range(TOKENS)))
    without = LogProbQuery(made.targets, made.temperatures, None)
    assert torch.equal(token_logprobs(*parameters, made)[0], token_logprobs(*parameters, without)[0])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_gradients_agree_with_finite_differences(seed: int) -> None:
    parameters, query = make(seed, whole=(1, 4))
    assert torch.autograd.gradcheck(
        lambda h, w, b: token_logprobs(h, w, b, query)[0], parameters, fast_mode=True, atol=1e-6, rtol=1e-5
    )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_entropy_gradients_agree_with_finite_differences(seed: int) -> None:
    parameters, made = make(seed, whole=(1, 4))
    query = replace(made, entropy_gradient=True)
    assert torch.autograd.gradcheck(
        lambda h, w, b: token_logprobs(h, w, b, query), parameters, fast_mode=True, atol=1e-6, rtol=1e-5
    )


def test_a_larger_candidate_set_lowers_the_log_prob() -> None:
    parameters, query = make()
    over_everything, _ = token_logprobs(*parameters, LogProbQuery(query.targets, query.temperatures, None))
    over_candidates, _ = token_logprobs(*parameters, query)
    assert bool((over_candidates > over_everything).all())


def test_a_single_candidate_has_log_prob_zero_and_no_gradient() -> None:
    parameters, query = make()
    alone = PackedCandidates(torch.ones(TOKENS, dtype=torch.int64), query.targets)
    values, entropies = token_logprobs(*parameters, LogProbQuery(query.targets, query.temperatures, alone))
    assert values.abs().max() == 0
    assert entropies.abs().max() == 0
    assert all(gradient.abs().max() == 0 for gradient in gradients(values, parameters))


@pytest.mark.usefixtures("blocks")
def test_bf16_inputs_are_summed_in_float32() -> None:
    parameters, made = make()
    coarse = [parameter.detach().bfloat16().requires_grad_() for parameter in parameters if parameter is not None]
    exact = [parameter.detach().double().requires_grad_() for parameter in coarse]
    for candidates in (made.candidates, None):
        query = LogProbQuery(made.targets, made.temperatures, candidates)
        values, _ = token_logprobs(*coarse, query)
        assert values.dtype == torch.float32
        expected = dense(list(exact), query)[0]
        torch.testing.assert_close(values.double(), expected, rtol=0, atol=1e-5)
        for ours, theirs in zip(gradients(values, list(coarse)), gradients(expected, list(exact)), strict=True):
            assert ours.dtype == torch.bfloat16
            torch.testing.assert_close(ours.double(), theirs, rtol=2**-7, atol=1e-4)


@pytest.mark.usefixtures("blocks")
def test_bf16_entropies_are_differentiated_in_float32() -> None:
    parameters, made = make()
    coarse = [parameter.detach().bfloat16().requires_grad_() for parameter in parameters if parameter is not None]
    exact = [parameter.detach().double().requires_grad_() for parameter in coarse]
    for candidates in (made.candidates, None):
        query = LogProbQuery(made.targets, made.temperatures, candidates, entropy_gradient=True)
        entropies = token_logprobs(*coarse, query)[1]
        assert entropies.dtype == torch.float32
        theirs = gradients(dense_entropies(list(exact), query), list(exact))
        for left, right in zip(gradients(entropies, list(coarse)), theirs, strict=True):
            torch.testing.assert_close(left.double(), right, rtol=2**-7, atol=1e-4)


def test_only_the_kept_rows_of_the_output_matrix_get_a_gradient() -> None:
    parameters, query = make()
    assert query.candidates is not None
    _, weight_gradient, _ = gradients(token_logprobs(*parameters, query)[0], parameters)
    touched = set(weight_gradient.abs().amax(1).nonzero().squeeze(1).tolist())
    assert touched <= set(query.candidates.token_ids.tolist())
    assert 0 < len(touched) < VOCABULARY


def test_frozen_inputs_get_no_gradient() -> None:
    (hidden, weight, bias), query = make()
    assert hidden is not None
    assert weight is not None
    values, _ = token_logprobs(hidden, weight.detach(), None if bias is None else bias.detach(), query)
    values.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_a_token_outside_its_candidates_is_refused() -> None:
    parameters, query = make()
    counts = torch.ones(TOKENS, dtype=torch.int64)
    others = (query.targets + 1) % VOCABULARY
    with pytest.raises(InvalidData, match="packed position 0 is 0 times") as refused:
        token_logprobs(*parameters, LogProbQuery(query.targets, query.temperatures, PackedCandidates(counts, others)))
    assert refused.value.code == "token_outside_candidates"


@pytest.mark.parametrize("bad", [-1, VOCABULARY])
def test_ids_outside_the_vocabulary_are_refused(bad: int) -> None:
    parameters, query = make()
    assert query.candidates is not None
    ids = query.candidates.token_ids.clone()
    ids[-1] = bad
    broken = PackedCandidates(query.candidates.counts, ids)
    with pytest.raises(InvalidData, match=r"candidates\.token_ids") as refused:
        token_logprobs(*parameters, LogProbQuery(query.targets, query.temperatures, broken))
    assert refused.value.code == "token_out_of_range"
    targets = query.targets.clone()
    targets[0] = bad
    with pytest.raises(InvalidData, match="targets"):
        token_logprobs(*parameters, LogProbQuery(targets, query.temperatures, None))


def test_nothing_of_size_tokens_by_vocabulary_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts elements of every tensor that an operation makes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    tokens, vocabulary, hidden, block = 256, 4096, 8, 2**14
    monkeypatch.setattr(ragged, "BLOCK_ELEMENTS", block)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = function(*arguments, **(keywords or {}))
            for part in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(part, Tensor):
                    largest = max(largest, part.numel())
            return result

    states = torch.randn(tokens, hidden, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, requires_grad=True)
    targets = torch.arange(tokens)
    ids = torch.stack([targets, targets + 1000, targets + 2000], 1).reshape(-1)
    for candidates in (PackedCandidates(torch.full((tokens,), 3), ids), None):
        with Watch():
            query = LogProbQuery(targets, torch.ones(tokens), candidates, entropy_gradient=True)
            values, entropies = token_logprobs(states, weight, None, query)
            (values + entropies).sum().backward()
    assert largest == vocabulary * hidden
