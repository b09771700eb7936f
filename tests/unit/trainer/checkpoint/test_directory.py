import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from services.common.errors import InvalidData
from services.trainer.checkpoint.directory import (
    FIXED,
    Checkpoints,
    SavedCheckpoint,
    TrainerState,
    check_resumable,
    read_checkpoint,
)


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
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


@pytest.mark.parametrize("crash_at", [1, 2])
def test_a_crash_while_a_step_is_saved_again_leaves_a_whole_one(tmp_path, monkeypatch, crash_at):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 2)
    renames = 0
    rename = Path.rename

    def crashing(path, target):
        nonlocal renames
        renames += 1
        if renames == crash_at:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", crashing)
        with pytest.raises(KeyboardInterrupt):
            save(checkpoints, 2)
    again = Checkpoints(tmp_path, keep=2)
    again.recover()
    assert (again.latest().path / "weights").read_text() == "2"
    save(again, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000004"]


def test_one_whose_replacement_stands_is_cleared(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 2)
    (tmp_path / "replaced-step-000002").mkdir()
    checkpoints.recover()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]


def test_steps_past_a_million_are_newer(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (999_999, 1_000_000):
        save(checkpoints, step)
    assert checkpoints.latest().state.step == 1_000_000


def test_a_checkpoint_from_before_there_were_digests_is_read(tmp_path):
    saved = save(Checkpoints(tmp_path, keep=2), 2)
    (saved.path / "trainer.json").write_text(json.dumps(asdict(state(2))))
    found = Checkpoints(tmp_path, keep=2).latest()
    assert (found.state, found.sums) == (state(2), None)


@pytest.mark.parametrize("content", ["", "[]", '{"step": 2}', '{"ledger"'])
def test_a_damaged_state_is_named_and_passed_over(tmp_path, content):
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 2)
    saved = save(checkpoints, 4)
    (saved.path / "trainer.json").write_text(content)
    with pytest.raises(InvalidData, match="is not a trainer state"):
        read_checkpoint(saved.path)
    assert checkpoints.latest().state.step == 2


def test_a_state_with_another_number_in_it_is_damaged(tmp_path):
    saved = save(Checkpoints(tmp_path, keep=2), 4)
    file = saved.path / "trainer.json"
    file.write_text(file.read_text().replace('"cursor": 4', '"cursor": 5'))
    with pytest.raises(InvalidData, match="its digest is not"):
        read_checkpoint(saved.path)


@pytest.mark.parametrize("field", ["model", "data"])
def test_another_runs_checkpoint_is_refused_with_a_remedy(tmp_path, field):
    saved = save(Checkpoints(tmp_path, keep=2), 2)
    fitting = {"model": "m", "data": "d", "world_size": 1, "settings": {}}
    check_resumable(saved, **fitting)
    with pytest.raises(InvalidData, match=f"has {field} .*, expected other: "):
        check_resumable(saved, **{**fitting, field: "other"})


def test_another_number_of_ranks_may_resume(tmp_path):
    saved = save(Checkpoints(tmp_path, keep=2), 2)
    check_resumable(saved, model="m", data="d", world_size=saved.state.world_size + 1, settings={})


@pytest.mark.parametrize("key", list(FIXED))
def test_a_setting_that_cannot_change_is_refused_by_name(tmp_path, key):
    saved = SavedCheckpoint(tmp_path, replace(state(2), settings={**dict.fromkeys(FIXED, "0"), key: "7"}))
    fitting = {"model": "m", "data": "d", "world_size": 1}
    check_resumable(saved, **fitting, settings=saved.state.settings)
    with pytest.raises(InvalidData, match=rf"^{key} is 0, expected 7 as in checkpoint .*: .* run.name a new one"):
        check_resumable(saved, **fitting, settings=dict.fromkeys(FIXED, "0"))


def test_a_checkpoint_from_before_a_setting_was_kept_is_taken(tmp_path):
    saved = save(Checkpoints(tmp_path, keep=2), 2)
    check_resumable(saved, model="m", data="d", world_size=1, settings=dict.fromkeys(FIXED, "0"))
