from dataclasses import replace

import numpy as np
import pytest
import torch

from services.common.errors import InvalidData
from services.common.run_files.audit_report import Mismatch
from services.common.wire.replay_data import CandidateSets
from services.trainer.audit import candidates
from services.trainer.audit.candidates import probability_sums, sampled_inside
from services.trainer.audit.compare import Comparison, compare
from services.trainer.batch.packing import PackedBatch, pack
from services.trainer.batch.samples import TrainSample
from services.trainer.engine.plain_engine import PlainEngine
from services.trainer.engine.protocol import PolicyOutput
from services.trainer.model.policy import Policy
from services.trainer.model.routing_replay import find_routers
from tests.support.trainer.model_families import make_model, make_samples

LENGTHS = [(4, 5), (1, 3), (6, 1), (2, 7), (5, 9), (3, 4)]
BUDGET = 24


def engine_of(family: str) -> PlainEngine:
    return PlainEngine(Policy(make_model(family)), torch.device("cpu"))


def native_routing(policy: Policy, sample: TrainSample) -> np.ndarray:
    """[P + C − 1, L, K] uint8: what the model's own routers choose."""
    seen = []
    hooks = [
        router.module.register_forward_hook(
            lambda _module, _inputs, output, rule=router.rule: seen.append(rule.indices(output))
        )
        for router in find_routers(policy.model)
    ]
    with torch.no_grad():
        policy(pack([replace(sample, replay=replace(sample.replay, routing=None))]), keep_routing=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1).numpy().astype(np.uint8)


def drawn_by(policy: Policy, samples: list[TrainSample]) -> list[TrainSample]:
    """The same samples, with the log-probs and, for an MoE, the routing that this policy gives them one by one."""
    moe = policy.facts.moe_layers > 0
    drawn = []
    for sample in samples:
        routing = native_routing(policy, sample) if moe else None
        routed = replace(sample, replay=replace(sample.replay, routing=routing))
        with torch.no_grad():
            logprobs, _ = policy(pack([routed]), keep_routing=moe)
        drawn.append(replace(routed, rollout_logprobs=logprobs.numpy()))
    return drawn


def row(comparison: Comparison, *replayed: str) -> Mismatch:
    return next(row for row in comparison.rows if row.replayed == replayed)


@pytest.fixture(scope="module")
def moe() -> tuple[PlainEngine, list[TrainSample]]:
    engine = engine_of("qwen3_moe")
    return engine, drawn_by(engine.policy, make_samples(LENGTHS, candidates=12))


def test_equal_weights_agree_and_what_is_not_replayed_shows(moe) -> None:
    engine, samples = moe
    comparison = compare(samples, engine, tokens_per_microbatch=BUDGET)
    assert [found.replayed for found in comparison.rows] == [
        ("routing", "candidates"),
        ("routing",),
        ("candidates",),
        (),
    ]
    both = row(comparison, "routing", "candidates")
    assert both.difference_max <= 1e-5
    assert both.ratio_mean == pytest.approx(1, abs=1e-5)
    assert abs(both.mismatch_kl) < 1e-9
    assert both.agreement == (1.0, 1.0)
    # The choice is the model's own, so that nothing is lost without its replay.
    assert row(comparison, "candidates").difference_max <= 1e-5
    assert row(comparison, "candidates").agreement == (1.0, 1.0)
    facts = comparison.candidates
    assert row(comparison, "routing").ratio_mean == pytest.approx(facts.mass_mean, abs=1e-4)
    assert facts.mass_min < facts.mass_mean < 0.9


def test_numbers_are_those_of_the_plain_formulas(moe) -> None:
    engine, samples = moe
    gap = torch.linspace(-0.5, 0.7, sum(len(sample.token_ids) for sample in samples), dtype=torch.float64)
    parts = gap.split([len(sample.token_ids) for sample in samples])
    shifted = [
        replace(sample, rollout_logprobs=sample.rollout_logprobs - part.numpy().astype(np.float32))
        for sample, part in zip(samples, parts, strict=True)
    ]
    found = row(compare(shifted, engine, tokens_per_microbatch=BUDGET), "routing", "candidates")
    assert found.difference_mean == pytest.approx(gap.abs().mean().item(), abs=1e-5)
    assert found.difference_max == pytest.approx(0.7, abs=1e-5)
    assert found.ratio_mean == pytest.approx(gap.exp().mean().item(), abs=1e-5)
    assert found.mismatch_kl == pytest.approx((gap.exp() - 1 - gap).mean().item(), abs=1e-5)
    assert (found.worst_sample, found.worst_position) == ("sample-5", 3)
    for level, value in found.difference_quantiles.items():
        assert value == pytest.approx(np.quantile(gap.abs().numpy(), float(level)), abs=1e-5)


def test_shifted_routing_shows_in_agreement_and_difference_of_its_layer(moe) -> None:
    engine, samples = moe
    tampered = []
    for sample in samples:
        routing = sample.replay.routing.copy()
        routing[:, 1] = (routing[:, 1] + 1) % engine.facts.experts
        tampered.append(replace(sample, replay=replace(sample.replay, routing=routing)))
    comparison = compare(tampered, engine, tokens_per_microbatch=BUDGET)
    both = row(comparison, "routing", "candidates")
    assert both.agreement[0] == 1.0
    assert both.agreement[1] < 0.2
    assert both.difference_max > 0.01
    assert row(comparison, "candidates").difference_max <= 1e-5


def test_a_sampler_that_routed_otherwise_agrees_only_with_replay() -> None:
    engine = engine_of("qwen3_moe")
    samples = make_samples(LENGTHS, routing=(2, 8, 2), candidates=12)
    with torch.no_grad():
        samples = [replace(sample, rollout_logprobs=engine.policy(pack([sample]))[0].numpy()) for sample in samples]
    comparison = compare(samples, engine, tokens_per_microbatch=BUDGET)
    assert row(comparison, "routing", "candidates").difference_max <= 1e-5
    assert row(comparison, "candidates").difference_max > 0.01
    assert max(row(comparison, "candidates").agreement) < 0.5


def test_a_dense_model_and_the_whole_vocabulary_have_fewer_rows() -> None:
    engine = engine_of("qwen3")
    masked = drawn_by(engine.policy, make_samples(LENGTHS, candidates=12))
    comparison = compare(masked, engine, tokens_per_microbatch=BUDGET)
    assert [found.replayed for found in comparison.rows] == [("candidates",), ()]
    assert comparison.rows[0].agreement == ()
    whole = drawn_by(engine.policy, make_samples(LENGTHS))
    comparison = compare(whole, engine, tokens_per_microbatch=BUDGET)
    assert [found.replayed for found in comparison.rows] == [()]
    assert comparison.rows[0].difference_max <= 1e-5
    assert comparison.candidates is None


def test_families_that_do_not_pack_are_compared_one_sample_at_a_time() -> None:
    engine = engine_of("gpt_oss")
    comparison = compare(drawn_by(engine.policy, make_samples(LENGTHS)), engine, tokens_per_microbatch=BUDGET)
    assert row(comparison, "routing").difference_max <= 1e-5


def test_candidate_facts_count_what_was_recorded(moe) -> None:
    engine, samples = moe
    facts = compare(samples, engine, tokens_per_microbatch=BUDGET).candidates
    sizes = np.concatenate([sample.replay.candidates.counts for sample in samples])
    assert facts.positions == facts.inside == facts.summed_positions == len(sizes)
    assert (facts.size_min, facts.size_max) == (sizes.min(), sizes.max())
    assert facts.size_mean == pytest.approx(sizes.mean())
    assert facts.sum_error_max <= 1e-5


def test_a_sampled_token_outside_its_set_is_counted_and_refused(moe) -> None:
    engine, samples = moe
    sample = samples[1]
    missing = np.setdiff1d(np.arange(3, 90, dtype=np.int32), sample.token_ids)[:1]
    sets = CandidateSets(np.ones(len(sample.token_ids), np.int32), np.array([*sample.token_ids[:-1], *missing]))
    tampered = replace(sample, replay=replace(sample.replay, candidates=sets))
    assert sampled_inside(tampered) == len(sample.token_ids) - 1
    with pytest.raises(InvalidData) as refused:
        compare([tampered], engine, tokens_per_microbatch=BUDGET)
    assert refused.value.code == "token_outside_candidates"


class _Doubling:
    """A head that forgets to normalise."""

    def __init__(self, engine: PlainEngine) -> None:
        self._engine = engine

    def logprobs(self, batch: PackedBatch, *, keep_routing: bool = True) -> PolicyOutput:
        output = self._engine.logprobs(batch, keep_routing=keep_routing)
        return replace(output, logprobs=output.logprobs + float(np.log(2)))


def test_probabilities_that_do_not_sum_to_one_are_seen(moe, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, samples = moe
    batch = pack(samples[:3])
    sums = probability_sums(batch, engine, keep_routing=True)
    torch.testing.assert_close(sums, torch.ones(batch.tokens, dtype=torch.float64), rtol=0, atol=1e-5)
    torch.testing.assert_close(probability_sums(batch, _Doubling(engine), keep_routing=True), 2 * sums)
    monkeypatch.setattr(candidates, "PAIRS_PER_BATCH", 40)
    assert 0 < len(probability_sums(batch, engine, keep_routing=True)) < batch.tokens
    monkeypatch.setattr(candidates, "PAIRS_PER_BATCH", 0)
    assert len(probability_sums(batch, engine, keep_routing=True)) == 0
