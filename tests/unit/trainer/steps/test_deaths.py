"""An entry that takes the trainer with it in the middle of a step is given up after some restarts, and not before."""

import json
import signal

import pytest
from trivet.v1 import step_pb2

from services.common.errors import InvalidData
from services.common.run_files.run_log import RunLog
from services.trainer.metrics import counters
from services.trainer.steps.deaths import TRAINER_ENDED, Deaths
from tests.support.trainer.orchestration import GROUPS, orchestrator, state, trained, until_training


def die_in_a_step(path, limit, requests):
    deaths = Deaths(path, limit)
    with pytest.raises(KeyboardInterrupt), deaths.step(requests):
        raise KeyboardInterrupt


def refused(deaths, requests):
    return [request for request in requests if is_refused(deaths, request)]


def is_refused(deaths, request):
    try:
        deaths.check(request)
    except InvalidData as error:
        return error.code == TRAINER_ENDED
    return False


def test_a_trainer_that_is_killed_in_a_step_leaves_its_pair_out_after_the_limit(warm_process, tmp_path):
    ended = warm_process.run("tests.support.trainer.dying_trainer", str(tmp_path), "3", "2")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == [signal.SIGKILL, signal.SIGKILL, 0], ended.stderr
    steps = RunLog(tmp_path / "dying").steps()
    assert [entry["step"] for entry in steps] == [1, 2, 3]
    used = [int(group.rpartition("-")[2]) for entry in steps for group in entry["groups"]]
    # The pair beside the deadly one in its step cannot be told from it.
    assert used == [0, 1, 4, 5, 6, 7]
    assert "pair left out" in ended.stdout


def test_each_unfinished_step_counts_once_and_a_finished_one_clears(tmp_path):
    path = tmp_path / "deaths.json"
    for _ in range(2):
        die_in_a_step(path, 2, [4, 5])
    assert refused(Deaths(path, 2), range(8)) == [4, 5]
    assert refused(Deaths(path, 2), range(8)) == [4, 5]
    assert refused(Deaths(path, 3), range(8)) == []
    with Deaths(path, 3).step([5, 6]):
        pass
    assert refused(Deaths(path, 1), range(8)) == [4]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"deaths": 3, "step": []}', '{"deaths": {"a": 1}, "step": []}'])
def test_a_damaged_file_counts_from_zero(tmp_path, text):
    path = tmp_path / "deaths.json"
    path.write_text(text, encoding="utf-8")
    deaths = Deaths(path, 1)
    assert refused(deaths, range(8)) == []
    with deaths.step([1]):
        assert json.loads(path.read_text(encoding="utf-8")) == {"deaths": {}, "step": [1]}


def test_its_groups_are_dead_lettered_and_lost_and_the_run_goes_on(config, redis_client, play, tmp_path):
    path, lost = tmp_path / "deaths.json", counters.GROUPS_LOST.labels(TRAINER_ENDED)
    config.trainer.max_lost_groups = 0
    made = orchestrator(config, redis_client)
    made.issue()
    play.answer()
    saved = state(made)
    dying = trained(until_training(made))
    assert len(dying) == GROUPS
    before = lost._value.get()
    for limit in (2, 2, 2):
        deaths = Deaths(path, limit)
        made = orchestrator(config, redis_client, deaths=deaths)
        made.restore(saved)
        order = until_training(made)
        if trained(order) != dying:
            break
        die_in_a_step(path, limit, trained(order))
    assert order.action == step_pb2.STEP_ACTION_TRAIN
    assert not set(trained(order)) & set(dying)
    assert made.ledger.lost == set(dying)
    assert lost._value.get() - before == GROUPS
    assert redis_client.xlen("run:dead") == GROUPS
