"""The loop of one rank over the plain engine, with orders from memory: what is published, saved and written down."""

import errno
import json
import math

import pytest
import torch
from prometheus_client import REGISTRY
from structlog.testing import capture_logs
from trivet.v1 import step_pb2, weights_pb2

from services.common.config import ConfigError
from services.common.errors import GaveUp, TrivetError
from services.common.run_files.run_log import RunLog
from services.trainer.checkpoint.directory import Checkpoints
from services.trainer.loop import Machinery, RankZero, TrainingLoop
from services.trainer.metrics import counters
from services.trainer.metrics.step_gauges import REPORTED_ELSEWHERE
from services.trainer.metrics.summary import STEP_PHASES
from services.trainer.model.policy import load_policy
from services.trainer.recording.recorder import Recorder
from services.trainer.steps.source import Order
from services.trainer.steps.status import Controls, Status
from services.trainer.update.open import open_updater
from tests.support.trainer.recorded_run import SavingEngine, configuration, make_base, make_order

STEPS = 6


class Orders:
    """A StepSource: one order after the other, and nothing to evaluate."""

    history, data_version = "history", "data"

    def __init__(self, config):
        self.config, self.step = config, 0
        self.status, self.controls = Status(config.run.name, config.trainer.steps), Controls()
        self.restored = None

    def restore(self, state):
        self.step, self.restored = state.step, state

    def issue(self): ...

    def next_order(self):
        return Order(make_order(self.step + 1))

    def evaluate(self):
        return None

    def held_out(self):
        return Order(step_pb2.StepOrder())

    def dump(self):
        return {}

    def commit(self): ...


class Release:
    """What rank 0 would announce."""

    def __init__(self, directory):
        self._directory, self.versions = directory, []

    def plan(self, version, *, durable):
        self._version = version
        return weights_pb2.PublicationPlan(staging=str(self._directory / f"v{version}"))

    def stored(self, staged):
        assert staged.exists()

    def announce(self):
        self.versions.append(self._version)

    def close(self): ...


class Engine(SavingEngine):
    """Not finite, in the forward with gradients, in the steps of `bad`; after step `burst` the weights are NaN."""

    def __init__(self, policy, source, *, bad=(), burst=None):
        super().__init__(policy)
        self.source, self.bad, self.burst = source, bad, burst

    def forward(self, batch, **options):
        output = super().forward(batch, **options)
        if self.source.step + 1 in self.bad:
            output.logprobs.data[0] = math.nan
        return output

    def step(self):
        result = super().step()
        if self.source.step + 1 == self.burst:
            with torch.no_grad():
                next(self.policy.parameters()).mul_(math.inf)
        return result


class Run:
    def __init__(self, directory, **trainer):
        if not (directory / "base").exists():
            make_base(directory / "base")
        self.config = configuration(directory, every=0)
        for name, value in {"steps": STEPS, "checkpoint_every": 2, **trainer}.items():
            setattr(self.config.trainer, name, value)
        self.source, self.release, self.lease = Orders(self.config), Release(directory), None
        self.run_log = RunLog(self.config.run.path)
        self.checkpoints = Checkpoints(self.config.run.path / "checkpoints", 10)

    def go(self, **faults):
        self.engine = Engine(load_policy(self.config.model.path, dtype="float32"), self.source, **faults)
        machinery = Machinery(
            engine=self.engine,
            updater=open_updater(self.config, self.engine, None),
            checkpoints=self.checkpoints,
            recorder=Recorder(self.config, self.engine),
            model="model",
            settings={},
        )
        return TrainingLoop(self.config, machinery, RankZero(self.source, self.run_log, self.release, self.lease)).run()

    @property
    def saved(self):
        return [saved.state.step for saved in self.checkpoints.list()]


def refuse(constant):
    raise AssertionError(f"{constant} is no JSON")


def lines(run):
    text = (run.config.run.path / "steps.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def skips(reason="forward"):
    return counters.STEPS_SKIPPED.labels(reason)._value.get()


def test_a_run_trains_publishes_saves_and_writes_down(tmp_path):
    run = Run(tmp_path)
    run.config.evaluation.every = 2
    assert run.go()
    assert run.release.versions == list(range(STEPS + 1))
    assert run.saved == [2, 4, 6]
    assert [line["step"] for line in lines(run)] == [1, 2, 3, 4, 5, 6]
    assert not any("skipped" in line for line in lines(run))
    seconds = {name for line in lines(run) for name in line["metrics"] if name.endswith("_seconds")}
    assert {f"{phase}_seconds" for phase in (*STEP_PHASES, "checkpoint", "evaluate")} <= seconds
    assert seconds <= REPORTED_ELSEWHERE.keys()


def test_a_run_with_the_same_reward_for_all_says_that_there_is_nothing_to_learn(tmp_path):
    run = Run(tmp_path, steps=STEPS + 1)

    def same_reward_but_in_step_2():
        order = make_order(run.source.step + 1)
        for scored in order.groups if run.source.step != 1 else ():
            for score in scored.scores:
                score.reward = score.raw_reward = 0.5
        return Order(order)

    run.source.next_order = same_reward_but_in_step_2
    with capture_logs() as logs:
        assert run.go()
    assert [line["metrics"]["steps_without_signal"] for line in lines(run)] == [1, 0, 1, 2, 3, 4, 5]
    (reported,) = [line for line in logs if line["event"].startswith("nothing to learn")]
    assert (reported["log_level"], reported["steps_in_a_row"], reported["rewards"]) == ("warning", 5, [0.5])
    assert REGISTRY.get_sample_value("trivet_trainer_steps_without_signal") == 5


def test_steps_that_are_not_finite_are_skipped_and_the_run_goes_on(tmp_path):
    run, before = Run(tmp_path), skips()
    assert run.go(bad=(2, 3))
    assert run.release.versions == list(range(STEPS + 1))
    assert run.engine.steps_applied == STEPS - 2
    assert skips() == before + 2
    reported = {line["step"]: line for line in lines(run)}
    assert [reported[step]["metrics"]["step_applied"] for step in range(1, 7)] == [1, 0, 0, 1, 1, 1]
    assert reported[2]["metrics"]["loss"] is None
    (skipped,) = reported[2]["skipped"]
    assert skipped["reason"] == "forward"
    assert skipped["samples"]
    assert set(skipped["samples"]) < set(reported[2]["samples"])
    # Who reads the run log sees no number where there was none.
    assert "loss" not in run.run_log.steps()[1]["metrics"]


def test_too_many_skipped_steps_in_a_row_end_the_run_for_good(tmp_path):
    run = Run(tmp_path, max_skipped_steps=2)
    sentence = r"3 steps in a row .* at most 2 allowed \(trainer\.max_skipped_steps\)"
    with pytest.raises(GaveUp, match=sentence) as failure:
        run.go(bad=(1, 3, 4, 5))
    assert failure.value.code == "too_many_skipped_steps"
    assert "the forward of step5-" in str(failure.value)
    assert "checkpoints/step-000004" in str(failure.value)
    # The first one alone is not in a row with the others.
    assert [line["step"] for line in lines(run)] == [1, 2, 3, 4, 5]


def test_weights_that_are_not_finite_are_neither_published_nor_saved(tmp_path):
    run = Run(tmp_path)
    with pytest.raises(GaveUp, match=r"step 4 left weights that are not finite") as failure:
        run.go(burst=4)
    assert failure.value.code == "weights_not_finite"
    assert "checkpoints/step-000002" in str(failure.value)
    assert run.release.versions == [0, 1, 2, 3]
    assert run.saved == [2]
    assert [line["step"] for line in lines(run)] == [1, 2, 3, 4]
    again = Run(tmp_path)
    assert again.go()
    assert again.source.restored.step == 2
    assert again.release.versions == [2, 3, 4, 5, 6]


def test_before_the_first_checkpoint_there_is_none_to_name(tmp_path):
    with pytest.raises(GaveUp, match="step 1 left weights .* there is no checkpoint yet"):
        Run(tmp_path).go(burst=1)


def test_a_policy_that_is_not_finite_is_refused_at_the_start(tmp_path):
    run = Run(tmp_path)
    broken = load_policy(run.config.model.path, dtype="float32").model
    with torch.no_grad():
        next(broken.parameters())[0, 0] = math.nan
    broken.save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match="base holds weights that are not finite"):
        run.go()
    assert run.release.versions == []


def test_a_checkpoint_that_is_not_finite_is_put_aside(tmp_path, monkeypatch):
    """Versions before this check saved them."""
    with monkeypatch.context() as before:
        before.setattr(Engine, "finite", lambda _: True)
        assert Run(tmp_path).go(burst=6)
    assert Run(tmp_path).saved == [2, 4, 6]
    resumed = Run(tmp_path)
    assert resumed.go()
    assert resumed.source.restored.step == 4


class LostLease:
    """Another trainer takes the run while step `step` is computed."""

    def __init__(self, source, step):
        self.source, self.step = source, step

    def check(self):
        if self.source.step >= self.step:
            raise TrivetError("lease_lost", "another trainer has the run")


def test_a_trainer_that_lost_the_run_to_another_writes_nothing_more(tmp_path):
    run = Run(tmp_path)
    run.lease = LostLease(run.source, step=4)
    with pytest.raises(TrivetError, match="another trainer has the run"):
        run.go()
    assert run.release.versions == [0, 1, 2, 3]
    assert [entry["step"] for entry in lines(run)] == [1, 2, 3]
    assert run.saved == [2]


@pytest.mark.parametrize("at", [0, 3])
def test_a_stop_while_the_run_starts_or_evaluates_leaves_a_checkpoint(tmp_path, at):
    run = Run(tmp_path, checkpoint_every=100)
    run.config.evaluation.every = 1

    def evaluate():
        if run.source.step == at:
            run.source.controls.stop.set()

    def next_order():
        stop = run.source.controls.stop.is_set()
        return Order(step_pb2.StepOrder(action=step_pb2.STEP_ACTION_STOP) if stop else make_order(run.source.step + 1))

    run.source.evaluate, run.source.next_order = evaluate, next_order
    assert not run.go()
    assert run.saved == [at]


@pytest.mark.parametrize("reward", [3e38, 1e308])
@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "grpo", "advantage_normalization": "none"},
        {"name": "grpo", "advantage_normalization": "std"},
        {"name": "grpo", "advantage_normalization": "none", "overlong_buffer": 4},
        {"name": "cispo", "advantage_normalization": "none"},
    ],
    ids=lambda algorithm: "-".join(map(str, algorithm.values())),
)
def test_rewards_that_are_too_large_for_a_step_do_not_end_the_run(tmp_path, algorithm, reward):
    """Differences and squares of them are beyond float32, or beyond float64."""
    run, before = Run(tmp_path, steps=3), {reason: skips(reason) for reason in ("forward", "loss", "gradient")}
    run.config.algorithm = run.config.algorithm.model_validate(algorithm)

    def next_order():
        step = run.source.step + 1
        return Order(make_order(step, [reward, -reward, 0.0, reward] if step == 2 else None))

    run.source.next_order = next_order
    assert run.go()
    first, second, third = lines(run)
    assert (first["metrics"]["step_applied"], third["metrics"]["step_applied"]) == (1, 1)
    counted = sum(skips(reason) - before[reason] for reason in before)
    if second["metrics"]["step_applied"] < 1:
        assert counted == len(second["skipped"])
        assert all(set(skipped["samples"]) <= set(second["samples"]) for skipped in second["skipped"])
    assert second["metrics"]["reward_mean"] == pytest.approx(reward / 4)
    assert second["metrics"]["reward_std"] == pytest.approx(math.sqrt(0.75) * reward)


def test_a_checkpoint_that_does_not_fit_on_the_disk_takes_no_space(tmp_path, monkeypatch):
    run = Run(tmp_path)

    def save(_, directory):
        directory.mkdir(parents=True)
        (directory / "part").write_bytes(b"part")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Engine, "save", save)
    with pytest.raises(OSError, match="No space left"):
        run.go()
    assert list((run.config.run.path / "checkpoints").iterdir()) == []
