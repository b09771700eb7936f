"""The loop on one rank with a plain engine; steps and held-out scores are what the test says."""

import time

import pytest
from trivet.v1 import step_pb2, weights_pb2

from services.common.errors import GaveUp
from services.common.run_files.held_out import read_best
from services.common.run_files.run_log import RunLog
from services.trainer.checkpoint.directory import Checkpoints
from services.trainer.loop import Machinery, RankZero, TrainingLoop
from services.trainer.model.policy import load_policy
from services.trainer.recording.recorder import Recorder
from services.trainer.steps.source import Order
from services.trainer.steps.status import Controls, Status
from services.trainer.update.open import open_updater
from tests.support.trainer.recorded_run import SavingEngine, configuration, make_base, make_order


class Script:
    """A StepSource."""

    history, data_version = "h", "d"

    def __init__(self, steps, accuracy, reward):
        self.step, self.status, self.controls = 0, Status("run", steps), Controls()
        self._accuracy, self._reward = accuracy, reward
        self.evaluated = []

    def restore(self, state):
        self.step = state.step

    def issue(self): ...

    def next_order(self):
        if self.controls.save_requested:
            return Order(step_pb2.StepOrder(action=step_pb2.STEP_ACTION_SAVE))
        return Order(make_order(self.step + 1, [self._reward(self.step + 1)] * 4))

    def evaluate(self):
        self.evaluated.append(self.step)
        return {"greedy_accuracy": self._accuracy(self.step), "greedy_accuracy_error": 0.02}

    def dump(self):
        return {"cursor": 0, "outstanding": {}, "lost": []}

    def commit(self): ...


class Nowhere:
    """A Release."""

    def __init__(self):
        self.plans = []

    def plan(self, version, *, durable):
        self.plans.append((version, durable))
        return weights_pb2.PublicationPlan()

    def announce(self): ...


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("loop")
    make_base(directory / "base")
    return directory


def settings(base, tmp_path, every, checkpoint_every, steps, **collapse):
    config = configuration(base, every=0)
    config.run.directory = tmp_path
    config.evaluation.every, config.trainer.steps = every, steps
    config.trainer.checkpoint_every, config.trainer.keep_checkpoints = checkpoint_every, 2
    for name, value in collapse.items():
        setattr(config.trainer.collapse, name, value)
    return config


def run(config, accuracy, reward=lambda step: 0.5):
    """The source, once the run has ended."""
    engine = SavingEngine(load_policy(config.model.path, dtype="float32"))
    checkpoints = Checkpoints(config.run.path / "checkpoints", config.trainer.keep_checkpoints)
    machinery = Machinery(
        engine, open_updater(config, engine, None), checkpoints, Recorder(config, engine), "model", {}
    )
    source = Script(config.trainer.steps, accuracy, reward)
    loop = TrainingLoop(config, machinery, RankZero(source, RunLog(config.run.path), Nowhere()))
    assert loop.run()
    return source


def test_a_version_is_published_again_when_the_source_asks_for_it(base, tmp_path):
    config = settings(base, tmp_path, every=0, checkpoint_every=100, steps=3)
    engine = SavingEngine(load_policy(config.model.path, dtype="float32"))
    machinery = Machinery(
        engine,
        open_updater(config, engine, None),
        Checkpoints(tmp_path / "c", 2),
        Recorder(config, engine),
        "model",
        {},
    )
    source, release = Script(3, lambda step: 0.5, lambda step: 0.5), Nowhere()
    train, asked = source.next_order, []

    def next_order():
        if source.step == 2 and not asked:
            asked.append(True)
            return Order(step_pb2.StepOrder(action=step_pb2.STEP_ACTION_PUBLISH))
        return train()

    source.next_order = next_order
    assert TrainingLoop(config, machinery, RankZero(source, RunLog(tmp_path / "r"), release)).run()
    assert release.plans == [(0, True), (1, False), (2, False), (2, True), (3, True)]


def kept(config):
    return sorted(int(path.name[5:]) for path in (config.run.path / "checkpoints").glob("step-*"))


def best(config):
    found = read_best(config.run.path / "checkpoints")
    return found and (found.step, found.score)


def test_the_best_checkpoint_stays_in_addition_to_the_newest(base, tmp_path):
    config = settings(base, tmp_path, every=2, checkpoint_every=2, steps=12)
    run(config, lambda step: {4: 0.9}.get(step, 0.5))
    assert (kept(config), best(config)) == ([4, 10, 12], (4, 0.9))


def test_a_better_score_between_two_checkpoints_is_saved(base, tmp_path):
    config = settings(base, tmp_path, every=1, checkpoint_every=5, steps=10)
    run(config, lambda step: {3: 0.9}.get(step, 0.5))
    assert (kept(config), best(config)) == ([3, 5, 10], (3, 0.9))


def test_an_equal_score_makes_no_checkpoint_of_its_own(base, tmp_path):
    config = settings(base, tmp_path, every=1, checkpoint_every=5, steps=7)
    run(config, lambda step: 1.0)
    assert (kept(config), best(config)) == ([5, 7], (7, 1.0))


def test_a_better_one_takes_its_place_and_a_restart_keeps_it(base, tmp_path):
    config = settings(base, tmp_path, every=1, checkpoint_every=100, steps=4)
    run(config, lambda step: {1: 0.6, 2: 0.9}.get(step, 0.5))
    assert (kept(config), best(config)) == ([2, 4], (2, 0.9))
    config.trainer.steps = 8
    config.trainer.checkpoint_every = 1
    run(config, lambda step: 0.5)
    assert (kept(config), best(config)) == ([2, 7, 8], (2, 0.9))
    config.trainer.steps = 10
    run(config, lambda step: {9: 0.95}.get(step, 0.5))
    assert (kept(config), best(config)) == ([9, 10], (9, 0.95))


def test_the_model_that_the_run_began_with_takes_no_checkpoint(base, tmp_path):
    config = settings(base, tmp_path, every=1, checkpoint_every=2, steps=4)
    run(config, lambda step: 0.9 - step / 10)
    assert (kept(config), best(config)) == ([2, 4], None)


def test_a_collapse_ends_the_run_and_names_the_best_checkpoint(base, tmp_path):
    config = settings(base, tmp_path, every=2, checkpoint_every=2, steps=40)
    with pytest.raises(GaveUp, match=r"from 0\.750 at step 4 to 0\.000, 0\.000, 0\.000 at steps 6, 8, 10") as ended:
        run(config, lambda step: {0: 0.5, 2: 0.6, 4: 0.75}.get(step, 0.0))
    assert f"the best checkpoint is {config.run.path.absolute()}/checkpoints/step-000004" in str(ended.value)
    assert kept(config) == [4, 8, 10]
    # Nobody has changed anything: a restart ends alike.
    with pytest.raises(GaveUp, match=r"from 0\.750 at step 4"):
        run(config, lambda step: 0.0)


def test_without_a_checkpoint_better_than_the_base_the_sentence_says_so(base, tmp_path):
    config = settings(base, tmp_path, every=1, checkpoint_every=100, steps=40)
    with pytest.raises(GaveUp, match="no checkpoint did better than the model that the run began with"):
        run(config, lambda step: 0.75 if step == 0 else 0.0)


def test_a_fallen_reward_asks_the_held_out_prompts_at_once(base, tmp_path):
    config = settings(base, tmp_path, every=0, checkpoint_every=100, steps=40, reward_steps=3)
    started = time.monotonic()
    with pytest.raises(GaveUp, match=r"mean reward of 3 steps fell from 0\.800 .* held-out accuracy fell from 0\.600"):
        run(config, lambda step: 0.6 if step <= 6 else 0.0, lambda step: 0.8 if step <= 6 else 0.0)
    evaluations = [entry["step"] for entry in RunLog(config.run.path).evaluations()]
    assert evaluations == [0, 9]
    assert time.monotonic() - started < 60


def test_a_fallen_reward_with_good_answers_to_held_out_prompts_goes_on(base, tmp_path):
    config = settings(base, tmp_path, every=0, checkpoint_every=100, steps=14, reward_steps=3)
    source = run(config, lambda step: 0.6, lambda step: 0.8 if step <= 6 else 0.0)
    assert source.evaluated == [0, 9, 14]
