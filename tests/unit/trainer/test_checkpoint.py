import json

import pytest

from services.common.errors import InvalidData
from services.trainer.checkpoint import Checkpoints, TrainerState, check_resumable


def state(step: int) -> TrainerState:
    ledger = {"cursor": 4, "outstanding": {}, "lost": []}
    return TrainerState(
        step=step, history="h", model="m", data="d", config="c", world_size=1, ledger=ledger, saved_at=1.0
    )


def save(checkpoints: Checkpoints, step: int):
    checkpoints.begin(step)
    (checkpoints.staging(step) / "weights").write_text(str(step))
    return checkpoints.commit(step, state(step))


def test_the_newest_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (2, 4, 10):
        save(checkpoints, step)
    assert [saved.state.step for saved in checkpoints.list()] == [4, 10]
    assert checkpoints.latest().state == state(10)


def test_an_unfinished_one_does_not_count_and_is_cleared(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 2)
    checkpoints.begin(4)
    assert Checkpoints(tmp_path, keep=2).latest().state.step == 2
    save(checkpoints, 6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000006"]


def test_a_step_saved_again_replaces_the_first(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 2)
    again = save(checkpoints, 2)
    assert (again.path / "weights").read_text() == "2"


def test_a_damaged_state_is_named(tmp_path):
    saved = save(Checkpoints(tmp_path, keep=2), 2)
    (saved.path / "trainer.json").write_text(json.dumps({"step": 2}))
    with pytest.raises(InvalidData, match="is not a trainer state"):
        Checkpoints(tmp_path, keep=2).latest()


@pytest.mark.parametrize("field", ["model", "data"])
def test_another_runs_checkpoint_is_refused_with_a_remedy(tmp_path, field):
    saved = save(Checkpoints(tmp_path, keep=2), 2)
    fitting = {"model": "m", "data": "d", "world_size": 1}
    check_resumable(saved, **fitting)
    with pytest.raises(InvalidData, match=f"has {field} .*, expected other: "):
        check_resumable(saved, **{**fitting, field: "other"})


def test_another_number_of_ranks_may_resume(tmp_path):
    saved = save(Checkpoints(tmp_path, keep=2), 2)
    check_resumable(saved, model="m", data="d", world_size=saved.state.world_size + 1)
