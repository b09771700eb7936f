import errno
import json

import pytest

from services.common.config import ConfigError
from services.common.errors import InvalidData
from services.common.run_files.lineage import config_version
from services.common.run_files.recorded_steps import chosen_steps, consecutive_steps, recorded_step, recorded_steps
from services.trainer.metrics import counters
from services.trainer.recording.recorder import Recorder
from tests.support.trainer.recorded_run import (
    SECRET,
    configuration,
    make_base,
    make_order,
    open_plain,
    record_run,
    train,
)


def numbers(run) -> list[int]:
    return [found.record.step for found in recorded_steps(run)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return record_run(tmp_path_factory.mktemp("recorded"), steps=3)


@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 4, 7])])
def test_the_first_step_and_then_every_nth(tmp_path, every, due):
    recorder = Recorder(configuration(tmp_path, every=every), engine=None)
    assert [step for step in range(1, 8) if recorder.due(step)] == due


def test_a_recording_holds_what_the_step_started_from_and_what_came_of_it(run):
    step = recorded_step(run, 2)
    record = step.record
    assert (record.step, record.policy_version, record.steps_applied) == (2, 1, 1)
    assert (record.world_size, record.zero_stage, record.groups) == (1, 1, 3)
    assert step.order() == make_order(2)
    assert record.digest_before == recorded_step(run, 1).record.digest_after
    assert record.digest_after == recorded_step(run, 3).record.digest_before
    assert record.digest_before != record.digest_after
    assert float.fromhex(record.metrics["grad_norm"]) > 0
    assert {"torch", "code", "device", "threads"} <= record.environment.keys()


def test_step_metrics_are_exact(run):
    metrics = recorded_step(run, 1).record.metrics
    assert len(metrics) > 10
    for text in metrics.values():
        assert float.fromhex(text).hex() == text


def test_the_configuration_comes_back_without_what_must_stay_secret(run):
    step = recorded_step(run, 1)
    original = configuration(run.parents[1])
    assert step.record.config_version == config_version(original)
    found, expected = step.config([]).dump(), original.dump()
    assert found["redis"]["url"] is None
    assert found["trainer"]["server"]["token"] is None
    for tree in (found, expected):
        del tree["redis"], tree["trainer"]["server"]
    assert found == expected
    files = [path for path in step.path.rglob("*") if path.is_file()]
    assert step.path / "config.yaml" in files
    for file in files:
        assert SECRET.encode() not in file.read_bytes(), file


def test_overrides_apply_to_the_recorded_configuration(run, monkeypatch):
    monkeypatch.setenv("TRIVET__TRAINER__ZERO_STAGE", "3")
    config = recorded_step(run, 1).config(["trainer.processes=2"])
    assert (config.trainer.processes, config.trainer.zero_stage) == (2, 1)
    with pytest.raises(ConfigError, match=r"trainer\.stepz is not a known key"):
        recorded_step(run, 1).config(["trainer.stepz=1"])


def test_the_newest_stay(tmp_path):
    before = counters.STEPS_RECORDED._value.get()
    assert numbers(record_run(tmp_path, steps=5, keep=2)) == [4, 5]
    assert counters.STEPS_RECORDED._value.get() == before + 5


def test_a_step_cut_short_leaves_nothing_to_be_found(tmp_path):
    make_base(tmp_path / "base")
    config = configuration(tmp_path)
    engine = open_plain(config)
    Recorder(config, engine).begin(1, make_order(1))
    assert recorded_steps(config.run.path) == []

    train(config, engine, Recorder(config, engine), range(1, 2))
    assert numbers(config.run.path) == [1]
    assert [path.name for path in (config.run.path / "recorded").iterdir()] == ["step-000001"]


@pytest.mark.parametrize("part", ["save", "export"])
def test_a_recording_that_does_not_fit_on_the_disk_takes_no_space(tmp_path, monkeypatch, part):
    make_base(tmp_path / "base")
    config = configuration(tmp_path)
    engine = open_plain(config)

    def full(directory):
        directory.mkdir(parents=True)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(engine, part, full)
    with pytest.raises(OSError, match="No space left"):
        Recorder(config, engine).begin(1, make_order(1))
    assert list((config.run.path / "recorded").iterdir()) == []


def test_resuming_from_an_earlier_step_makes_later_recordings_void(tmp_path):
    run = record_run(tmp_path, steps=4)
    config = configuration(tmp_path)
    engine = open_plain(config)
    engine.load(recorded_step(run, 2).engine)
    train(config, engine, Recorder(config, engine), range(2, 3))
    assert numbers(run) == [1, 2]


def test_a_damaged_recording_does_not_keep_the_run_from_recording(tmp_path):
    run = record_run(tmp_path, steps=3)
    (run / "recorded" / "step-000001" / "record.json").write_text("")
    config = configuration(tmp_path, keep=3)
    engine = open_plain(config)
    train(config, engine, Recorder(config, engine), range(3, 5))
    assert sorted(path.name for path in (run / "recorded").iterdir()) == [f"step-00000{n}" for n in (2, 3, 4)]


def test_missing_steps_are_reported_with_those_there_are(run, tmp_path):
    with pytest.raises(InvalidData, match=r"step 9 .* is not recorded, expected one of \[1, 2, 3\]"):
        recorded_step(run, 9)
    with pytest.raises(InvalidData, match=r"has no recorded steps, expected some \(trainer\.recording\.every\)"):
        chosen_steps(tmp_path, [])
    with pytest.raises(InvalidData, match="step 4"):
        consecutive_steps(run, 2, 4)
    with pytest.raises(InvalidData, match="expected at least the first"):
        consecutive_steps(run, 3, 2)
    assert [step.record.step for step in chosen_steps(run, [3, 1])] == [3, 1]
    assert [step.record.step for step in chosen_steps(run, [])] == [1, 2, 3]


def test_steps_that_do_not_follow_each_other_are_refused(tmp_path):
    run = record_run(tmp_path, steps=2)
    file = recorded_step(run, 2).path / "record.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "digest_before": "0" * 32}))
    with pytest.raises(InvalidData, match="does not start from what step 1 ended with"):
        consecutive_steps(run, 1, 2)
    file.write_text(json.dumps({**record, "digest_before": "0" * 32, "world_size": 2}))
    assert len(consecutive_steps(run, 1, 2)) == 2


def test_damaged_files_are_named(tmp_path):
    run = record_run(tmp_path, steps=1)
    step = recorded_step(run, 1)
    (step.path / "order.pb.zst").write_bytes(b"no frame")
    with pytest.raises(InvalidData, match=r"order\.pb\.zst is not a recorded order"):
        step.order()
    (step.path / "record.json").write_text("{}")
    with pytest.raises(InvalidData, match=r"record\.json is not a step's record"):
        recorded_step(run, 1)
