import threading

import pytest
from trivet.v1 import step_pb2, trainer_pb2

from services.common.config import parse_config
from services.trainer.batch.groups import batch_samples
from services.trainer.batch.pairs import pairs_of
from services.trainer.checkpoint.directory import TrainerState
from services.trainer.data.preferences import PairRow, PreferenceData
from services.trainer.data.rows import RowSet
from services.trainer.model.policy import Policy
from services.trainer.steps.pair_feed import PairFeed
from services.trainer.steps.status import Controls, Status
from tests.support.trainer.model_families import make_model
from tests.support.trainer.plain_engine import DescentEngine

STEP = 3


@pytest.fixture
def config():
    return parse_config(
        {
            "run": {"name": "pairs"},
            "model": {"path": "models/none"},
            "data": {"preferences": {"kind": "jsonl", "path": "pairs.jsonl"}},
            "algorithm": {"name": "dpo"},
            "trainer": {"groups_per_step": STEP},
        }
    )


def rows(count, first=0):
    return [PairRow(str(n), f"sort {n}", [3, 4], "good", [5, 6, 1], "bad", [7, 1]) for n in range(first, first + count)]


@pytest.fixture
def feed(config):
    data = PreferenceData(RowSet(rows(5), 1, True), RowSet(rows(2, 5), 1, False), "d1", 0)
    return PairFeed(config, data, Status("pairs", 10), Controls())


def pair_ids(order):
    return [scored.group.prompt.prompt_id for scored in order.message.groups]


def test_each_row_comes_once_an_epoch(feed):
    seen = [pair for _ in range(5) for pair in pair_ids(feed.next_order())]
    assert sorted(seen) == sorted([str(n) for n in range(5)] * 3)
    assert feed.dump() == {"cursor": 15}
    assert feed.status.groups_trained == 15


def test_it_resumes_where_the_checkpoint_was(feed, config):
    feed.next_order()
    saved = TrainerState(1, feed.history, "m", feed.data_version, "c", 1, feed.dump(), 0.0)
    expected = feed.next_order()
    other = PairFeed(config, feed.data, Status("pairs", 10), Controls())
    other.restore(saved)
    assert other.next_order() == expected
    assert other.step == 1


def test_a_pair_is_a_group_of_two_that_trains(feed, config):
    facts = DescentEngine(Policy(make_model("qwen3"))).facts
    samples = batch_samples(feed.next_order().message, config, facts)
    pairs = pairs_of(samples)
    assert len(pairs) == STEP
    assert [pair.chosen.token_ids.tolist() for pair in pairs] == [[5, 6, 1]] * STEP
    assert [pair.rejected.token_ids.tolist() for pair in pairs] == [[7, 1]] * STEP
    assert {pair.chosen.temperature for pair in pairs} == {1.0}


def test_held_out_pairs_are_those_of_validation(feed):
    assert pair_ids(feed.held_out()) == ["5", "6"]
    assert feed.evaluate() is None
    assert feed.dump() == {"cursor": 0}


def test_stop_and_save_come_first(feed):
    feed.controls.request_save()
    assert feed.next_order().message.action == step_pb2.STEP_ACTION_SAVE
    feed.controls.stop.set()
    assert feed.next_order().message.action == step_pb2.STEP_ACTION_STOP


def test_a_pause_waits_without_training(feed):
    feed.controls.pause()
    threading.Timer(0.05, feed.controls.stop.set).start()
    assert feed.next_order().message.action == step_pb2.STEP_ACTION_WAIT
    assert feed.status.state == trainer_pb2.TRAINER_STATE_PAUSED
    assert feed.dump() == {"cursor": 0}
