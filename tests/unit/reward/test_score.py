import asyncio
import json

import pytest
from prometheus_client import REGISTRY
from trivet.v1 import reward_pb2, sample_pb2

from services.common.config import RewardConfig, ScorerConfig
from services.common.errors import InvalidData
from services.reward.cache import ScoreCache, cache_key
from services.reward.isolation.pool import ScorerPool
from services.reward.score import GroupScorer, combine
from services.reward.scorers.types import ScorerFailure
from services.reward.stats import RewardStats

FLAKY = "tests.support.reward.scorers:flaky"


def make_group(texts, metadata=None, purpose=sample_pb2.PURPOSE_TRAIN):
    return sample_pb2.Group(
        prompt=sample_pb2.Prompt(
            group_id="g1", text="sort 21", metadata_json=json.dumps(metadata or {"answer": "12"}), purpose=purpose
        ),
        samples=[sample_pb2.Sample(sample_id=f"g1/0/{i}", index=i, text=text) for i, text in enumerate(texts)],
    )


class Scoring:
    """A group scorer on a real pool."""

    def __init__(self, *scorers, **options):
        self.config = RewardConfig(
            scorers=[
                {**scorer, "name": f"tests.support.reward.scorers:{scorer['name'][1:]}"}
                if scorer["name"].startswith(":")
                else scorer
                for scorer in ({"name": s} if isinstance(s, str) else s for s in scorers)
            ],
            **{"timeout_seconds": 30.0, **options},
        )
        self.stats = RewardStats()

    async def __aenter__(self):
        self.pool = ScorerPool(self.config.scorers, workers=1, timeout_seconds=self.config.timeout_seconds)
        await self.pool.start()
        self.scorer = GroupScorer(self.config, self.pool, self.stats, "reward-1")
        return self

    async def __aexit__(self, *_):
        await self.pool.stop()

    async def score(self, *texts, **metadata):
        return await asyncio.wait_for(self.scorer.score(make_group(texts, metadata)), 20)


async def test_a_group_is_scored_in_order_and_kept_whole():
    async with Scoring("exact_match") as scoring:
        group = make_group(["12", "21", "12 "])
        scored = await scoring.scorer.score(group)
        assert isinstance(scored, sample_pb2.ScoredGroup)
        assert scored.group == group
        assert [score.reward for score in scored.scores] == [1.0, 0.0, 1.0]
        assert scored.scores[0].components == {"exact_match": 1.0}
        assert scored.reward_id == "reward-1"
        assert (scoring.stats.groups, scoring.stats.samples, scoring.stats.failures) == (1, 3, 0)
        assert scoring.stats.mean_reward == pytest.approx(2 / 3)


async def test_the_reward_is_the_weighted_sum_of_named_components():
    format_scorer = {"name": "regex", "weight": 0.25, "options": {"pattern": r"^\d+$"}}
    short_scorer = {"name": "regex", "weight": 0.25, "options": {"pattern": r"^.{1,3}$"}}
    async with Scoring({"name": "exact_match", "weight": 0.5}, format_scorer, short_scorer) as scoring:
        scored = await scoring.score("12", "21", "many words", answer="12")
        assert [score.raw_reward for score in scored.scores] == [1.0, 0.5, 0.0]
        assert scored.scores[1].components == {"exact_match": 0.0, "regex": 1.0, "regex_2": 1.0}


async def test_one_sample_without_a_score_fails_the_group_and_is_named():
    async with Scoring("exact_match", ":dies_when_asked", maximum=2.0, retries=1) as scoring:
        outcome = await scoring.score("12", "die", answer="12")
        assert isinstance(outcome, reward_pb2.ScoreFailure)
        assert outcome.code == "scorer_crash"
        assert outcome.scorer == "tests.support.reward.scorers:dies_when_asked"
        assert outcome.sample_id == "g1/0/1"
        assert (scoring.stats.groups, scoring.stats.failures) == (0, 1)


@pytest.mark.parametrize("failures", [2, 3])
async def test_a_failing_scorer_is_tried_again_as_often_as_configured(open_path, failures):
    calls = open_path / "calls"
    async with Scoring(":flaky", retries=2) as scoring:
        before = _metric("trivet_reward_retries_total", scorer=FLAKY, code="scorer_error")
        outcome = await scoring.score("12", calls=str(calls), failures=failures)
        after = _metric("trivet_reward_retries_total", scorer=FLAKY, code="scorer_error")
        assert after - before == 2
        assert len(calls.read_text()) == 3
        if failures == 2:
            assert outcome.scores[0].reward == 1.0
        else:
            assert (outcome.code, outcome.reason) == ("scorer_error", "not yet")


async def test_what_cannot_get_better_is_not_tried_again():
    async with Scoring("exact_match", retries=5) as scoring:
        before = _metric("trivet_reward_retries_total", scorer="exact_match", code="scorer_metadata")
        outcome = await scoring.score("12", other="12")
        assert outcome.code == "scorer_metadata"
        assert _metric("trivet_reward_retries_total", scorer="exact_match", code="scorer_metadata") == before


@pytest.mark.parametrize(
    ("name", "code", "calls"),
    [
        ("hangs_deterministically", "scorer_timeout", 1),
        ("hangs", "scorer_timeout", 2),
        ("raises_deterministically", "scorer_error", 1),
        ("dies", "scorer_crash", 2),
    ],
)
async def test_a_failure_is_tried_again_where_that_may_help(open_path, name, code, calls):
    scorer = f"tests.support.reward.evil_scorers:{name}"
    async with Scoring(scorer, timeout_seconds=0.5, retries=5) as scoring:
        outcome = await scoring.score("12", calls=str(open_path / "calls"))
        assert (outcome.code, outcome.scorer) == (code, scorer)
        assert len((open_path / "calls").read_text()) == calls


async def test_a_group_that_makes_the_service_itself_raise_is_given_up_alone(monkeypatch):
    async with Scoring("exact_match") as scoring:
        with monkeypatch.context() as broken:
            broken.setattr("services.reward.score.combine", lambda *_: "\ud800".encode())
            before = _metric("trivet_reward_failures_total", code="entry_unusable")
            with pytest.raises(InvalidData, match="UnicodeEncodeError") as caught:
                await scoring.score("12", answer="12")
            assert caught.value.code == "entry_unusable"
            assert _metric("trivet_reward_failures_total", code="entry_unusable") - before == 1
        assert scoring.stats.running == 0
        assert (await scoring.score("12", answer="12")).scores[0].reward == 1.0


async def test_a_timeout_is_a_failure_and_counted():
    async with Scoring(":endless_when_asked", timeout_seconds=0.3, retries=0) as scoring:
        before = _metric("trivet_reward_failures_total", code="scorer_timeout")
        outcome = await scoring.score("fine", "hang")
        assert outcome.code == "scorer_timeout"
        assert _metric("trivet_reward_failures_total", code="scorer_timeout") - before == 1


async def test_a_deterministic_score_is_computed_once(open_path):
    calls = open_path / "calls"
    async with Scoring(":counted") as scoring:
        first = await scoring.score("12", calls=str(calls))
        again = await scoring.score("12", calls=str(calls))
        assert first.scores == again.scores
        assert calls.read_text() == "x"
        assert scoring.stats.cache_hits == 1
        await scoring.score("13", calls=str(calls))
        assert calls.read_text() == "xx"


async def test_without_the_mark_or_without_room_nothing_is_cached(open_path):
    calls = open_path / "calls"
    async with Scoring(":counted", cache_size=0) as scoring:
        await scoring.score("12", calls=str(calls))
        await scoring.score("12", calls=str(calls))
        assert (calls.read_text(), scoring.stats.cache_hits) == ("xx", 0)
    async with Scoring(":length", maximum=10) as scoring:
        await scoring.score("12")
        await scoring.score("12")
        assert scoring.stats.cache_hits == 0


async def test_a_failure_is_not_cached(open_path):
    async with Scoring("exact_match", retries=0) as scoring:
        for _ in range(2):
            assert (await scoring.score("12", other="12")).code == "scorer_metadata"
        assert scoring.stats.cache_hits == 0


async def test_a_bad_group_is_refused_and_counted():
    async with Scoring("exact_match") as scoring:
        before = _metric("trivet_reward_failures_total", code="group_size")
        with pytest.raises(InvalidData, match="has 0 samples"):
            await scoring.scorer.score(make_group([]))
        assert _metric("trivet_reward_failures_total", code="group_size") - before == 1
        assert scoring.stats.running == 0


def limits(**options):
    return RewardConfig(scorers=[ScorerConfig(name="exact_match")], **options)


@pytest.mark.parametrize(("minimum", "maximum", "raw"), [(0, 1, 1.01), (0, 1, -0.01), (-1, 1, 2.0)])
def test_a_reward_out_of_range_is_a_failure(minimum, maximum, raw):
    outcome = combine({"a": raw}, {"a": 1.0}, limits(minimum=minimum, maximum=maximum))
    assert isinstance(outcome, ScorerFailure)
    assert outcome.code == "reward_out_of_range"
    assert f"{minimum} to {maximum}" in outcome.reason


@pytest.mark.parametrize(
    ("components", "weights"),
    [
        ({"a": 1e308}, {"a": 1e10}),
        ({"a": 1e308, "b": 1e308}, {"a": 1.0, "b": 1.0}),
        ({"a": 1e308, "b": -1e308}, {"a": 1e10, "b": 1e10}),
    ],
)
def test_a_sum_that_overflows_is_a_failure(components, weights):
    outcome = combine(components, weights, limits())
    assert isinstance(outcome, ScorerFailure)
    assert outcome.code == "reward_not_finite"


@pytest.mark.parametrize("raw", [1e39, -1e39, 1e308, -1e308])
def test_a_reward_that_the_trainer_cannot_hold_is_out_of_any_range(raw):
    outcome = combine({"a": raw}, {"a": 1.0}, limits(minimum=-3.4e38, maximum=3.4e38))
    assert isinstance(outcome, ScorerFailure)
    assert outcome.code == "reward_out_of_range"


def test_rounding_is_not_out_of_range():
    weights = {"a": 0.1, "b": 0.1, "c": 0.8}
    score = combine({"a": 1.0 + 1e-12, "b": 1.0, "c": 1.0}, weights, limits())
    assert score.reward == 1.0


@pytest.mark.parametrize(("raw", "normalized"), [(-2.0, 0.0), (0.0, 0.5), (1.0, 0.75), (2.0, 1.0)])
def test_normalization_maps_the_range_to_the_unit_interval(raw, normalized):
    config = limits(minimum=-2, maximum=2, normalize=True)
    score = combine({"a": raw}, {"a": 1.0}, config)
    assert (score.reward, score.raw_reward) == (normalized, raw)
    assert combine({"a": raw}, {"a": 1.0}, limits(minimum=-2, maximum=2)).reward == raw


def test_the_cache_drops_what_was_used_longest_ago():
    cache = ScoreCache(2)
    cache.put(b"a", 0.0)
    cache.put(b"b", 1.0)
    assert cache.get(b"a") == 0.0
    cache.put(b"c", 0.5)
    assert (cache.get(b"a"), cache.get(b"b"), cache.get(b"c")) == (0.0, None, 0.5)
    assert len(cache) == 2


def test_the_cache_key_holds_everything_that_a_score_depends_on():
    prompt = sample_pb2.Prompt(text="p", metadata_json="{}")
    sample = sample_pb2.Sample(text="c")
    scorer = ScorerConfig(name="regex", options={"pattern": "a"})
    keys = {
        cache_key(scorer, prompt, sample),
        cache_key(ScorerConfig(name="numeric", options={"pattern": "a"}), prompt, sample),
        cache_key(ScorerConfig(name="regex", options={"pattern": "b"}), prompt, sample),
        cache_key(scorer, sample_pb2.Prompt(text="pc", metadata_json="{}"), sample_pb2.Sample(text="")),
        cache_key(scorer, sample_pb2.Prompt(text="p", metadata_json='{"a": 1}'), sample),
        cache_key(scorer, prompt, sample_pb2.Sample(text="d")),
    }
    assert len(keys) == 6
    assert cache_key(scorer, prompt, sample_pb2.Sample(text="c", sample_id="other")) in keys


async def test_evaluation_does_not_enter_the_mean_of_training():
    async with Scoring("exact_match") as scoring:
        await scoring.scorer.score(make_group(["12"]))
        await scoring.scorer.score(make_group(["21", "21"], purpose=sample_pb2.PURPOSE_EVALUATION))
        assert scoring.stats.mean_reward == 1.0
        assert _metric("trivet_reward_mean", purpose="train") == 1.0
        assert _metric("trivet_reward_mean", purpose="evaluation") == 0.0


def _metric(name, **labels):
    return REGISTRY.get_sample_value(name, labels) or 0.0
