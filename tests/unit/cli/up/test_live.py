from io import StringIO

from rich.console import Console
from trivet.v1 import rollout_pb2, trainer_pb2

from services.cli.up.live import View, panel
from services.cli.up.observation import Observation

STEP = {
    "reward_mean": 0.5,
    "kl": 0.01,
    "sampler_ratio_mean": 1.0,
    "routing_agreement": 0.99,
    "masked_fraction": 0.1,
}


def observation(step: int = 3) -> Observation:
    trainer = trainer_pb2.TrainerServiceGetStatusResponse(
        run="run",
        state=trainer_pb2.TRAINER_STATE_TRAINING,
        step=step,
        steps=10,
        version=step,
        metrics={**STEP, "tokens_per_second": 321.0},
        evaluation={"greedy_accuracy": 0.75, "sampled_accuracy": 0.625},
        eta_seconds=65,
    )
    rollout = rollout_pb2.RolloutServiceGetStatusResponse(version=2, tokens_per_second=1234)
    return Observation(trainer, {"rollout-0": rollout}, {"prompts": 5, "samples": 1, "scored": 7})


def rendered(seen: Observation) -> str:
    console = Console(file=StringIO(), width=160)
    console.print(panel("run", seen))
    return console.file.getvalue()


def test_the_panel_shows_what_one_wants_to_know():
    text = rendered(observation())
    for expected in ("3 / 10", "0.500", "0.750", "0.625", "0.01000", "1.00000", "0.9900", "0.100", "1:05", "training"):
        assert expected in text
    assert "trainer 3, rollout 2" in text
    assert "prompts 5 · samples 1 · scored 7" in text
    assert "train 321, sample 1234" in text


def test_a_run_with_nothing_to_learn_is_reported():
    for steps, reported in ((4.0, False), (5.0, True), (60.0, True)):
        seen = observation()
        seen.trainer.metrics["steps_without_signal"] = steps
        console = Console(file=StringIO(), width=300)
        with View(console, "run") as view:
            view.show(seen)
        for text in (rendered(seen), console.file.getvalue()):
            assert (f"nothing to learn in the last {steps:.0f} steps" in text) == reported


def test_a_trainer_that_starts_is_reported():
    assert "starting" in rendered(Observation())


def test_without_a_terminal_each_step_is_one_line():
    console = Console(file=StringIO(), width=40)
    with View(console, "run") as view:
        for step in (1, 1, 2):
            view.show(observation(step))
    lines = console.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/10", "2/10"]


def test_without_a_terminal_what_is_awaited_before_the_first_step_is_reported_once():
    console = Console(file=StringIO(), width=300)
    evaluating = observation()
    evaluating.trainer.metrics.clear()
    evaluating.trainer.state = trainer_pb2.TRAINER_STATE_EVALUATING
    alone = Observation(evaluating.trainer, {}, {"prompts": 8})
    with View(console, "run") as view:
        for seen in (Observation(), Observation(), alone, evaluating, evaluating, observation()):
            view.show(seen)
    assert console.file.getvalue().splitlines()[:3] == [
        "the trainer is starting …",
        "the trainer is evaluating; no rollout answers yet …",
        "the trainer is evaluating …",
    ]
    assert len(console.file.getvalue().splitlines()) == 4
