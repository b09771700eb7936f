import json
from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer import Exit
from typer.testing import CliRunner

from services.cli.app import app
from services.cli.shared.output import say
from services.cli.up import command, report
from services.cli.up.run_lock import run_lock
from services.cli.up.supervisor import RunFailed
from services.common.exit_codes import GAVE_UP
from services.common.run_files.run_log import RunLog

QUICKSTART = Path(__file__).parents[4] / "configs" / "quickstart.yaml"


@pytest.fixture
def config_file(tmp_path):
    tree = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    del tree["prepare"]
    tree["run"]["directory"] = str(tmp_path / "runs")
    tree["trainer"]["steps"] = 3
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return file


@pytest.fixture
def run(config_file):
    return config_file.parent / "runs" / "quickstart"


class Supervised:
    """Stands for the supervisor: starts nothing; `outcome` is what comes of the run."""

    outcome: "bool | Exception" = True

    def __init__(self, *_, **__) -> None:
        self.redis, self.grpc_ports = None, {"trainer": 1}
        type(self).made = self

    def start(self, _) -> None:
        if isinstance(self.outcome, Exception):
            raise self.outcome

    def finished(self) -> bool:
        return True

    def stop(self, _) -> None:
        return


@pytest.fixture(autouse=True)
def _blank_picture(monkeypatch):
    """Drawing one takes most of a second."""
    monkeypatch.setattr(command, "plot", lambda _, path: path.touch())


@pytest.fixture
def supervised(monkeypatch):
    class Own(Supervised):
        made = None

    monkeypatch.setattr(command, "Supervisor", Own)
    # The model is not there.
    monkeypatch.setattr(command, "refuse_problems", lambda *_: None)
    return Own


def train(run: Path, last: int = 3) -> None:
    run_log = RunLog(run)
    for step in range(1, last + 1):
        run_log.add_step({"step": step, "metrics": {"reward_mean": step / 10}})
    for step in (0, last):
        run_log.add_evaluation({"step": step, "metrics": {"greedy_accuracy": 0.5, "greedy_accuracy_error": 0.1}})
    save(run, last)


def save(run: Path, step: int, at: float = 1.0) -> None:
    directory = run / "checkpoints" / f"step-{step:06d}"
    directory.mkdir(parents=True)
    (directory / "trainer.json").write_text(json.dumps({"step": step, "saved_at": at}))


def up(config_file: Path, *arguments: str):
    return CliRunner().invoke(app, ["up", str(config_file), *arguments])


def test_a_finished_run_is_reported_and_nothing_is_started(config_file, run, supervised):
    train(run)
    ended = up(config_file)
    assert ended.exit_code == 0, ended.output
    assert supervised.made is None
    assert "run quickstart is finished: its checkpoint holds step 3, and trainer.steps is 3" in ended.output
    assert "Raise trainer.steps to continue, or start over with --fresh" in ended.output


@pytest.mark.parametrize("more", [("--set", "trainer.steps=4"), ("--fresh",)])
def test_more_steps_or_a_fresh_start_go_on(config_file, run, supervised, more):
    train(run)
    assert up(config_file, *more).exit_code == 0
    assert supervised.made is not None


def test_what_prepare_makes_is_checked_before_anything_is_started(config_file, supervised, monkeypatch):
    made = config_file.parent / "made"
    tree = yaml.safe_load(config_file.read_text(encoding="utf-8"))
    tree["prepare"] = {"command": ["touch", str(made)], "creates": str(made)}
    config_file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    checked = []

    def refuse_the_second_time(*_) -> None:
        checked.append(made.exists())
        if len(checked) == 2:
            raise Exit(2)

    monkeypatch.setattr(command, "refuse_problems", refuse_the_second_time)
    assert up(config_file).exit_code == 2
    assert checked == [False, True]
    assert supervised.made is None
    # Nothing new was made: one look is enough.
    assert up(config_file).exit_code == 0
    assert checked == [False, True, True]


def test_a_run_whose_last_evaluation_is_missing_is_not_finished(config_file, run, supervised):
    save(run, 3)
    up(config_file)
    assert supervised.made is not None


def test_fresh_forgets_all_but_the_lock(config_file, run, supervised):
    train(run)
    supervised.outcome = RunFailed("no")
    up(config_file, "--fresh")
    assert [path.name for path in run.iterdir()] == ["lock"]


@pytest.mark.parametrize("fresh", [(), ("--fresh",)])
def test_a_run_that_another_has_is_left_alone(config_file, run, supervised, fresh):
    train(run)
    with run_lock(run):
        ended = up(config_file, *fresh)
    assert ended.exit_code == 1
    assert "is in use by another `trivet up`" in ended.output
    assert (run / "steps.jsonl").exists()
    assert supervised.made is None


def test_a_run_that_gave_up_leaves_with_that_status_and_is_not_said_to_go_on_as_it_is(config_file, run, supervised):
    train(run, 2)
    supervised.outcome = RunFailed("trainer: accuracy fell", GAVE_UP)
    ended = up(config_file)
    assert ended.exit_code == GAVE_UP
    assert "Started again as it is, it would end the same way" in ended.output.splitlines()[-2]


def test_the_reason_of_a_failure_comes_before_what_was_done(config_file, run, supervised):
    train(run, 2)
    supervised.outcome = RunFailed("reward-0: cannot read [/data/judge]\nits log is logs/reward-0.log")
    ended = up(config_file, "--set", "redis.url=redis://me:hidden-word@h/0", "--set", "run.seed=[b]7")
    assert ended.exit_code == 2
    ended = up(config_file, "--set", "redis.url=redis://me:hidden-word@h/0", "--set", "algorithm.name=grpo")
    assert ended.exit_code == 1
    lines = ended.output.splitlines()
    assert lines[:2] == ["failed: reward-0: cannot read [/data/judge]", "its log is logs/reward-0.log"]
    assert ended.output.index("failed:") < ended.output.index("Before and after")
    assert lines[-2] == "Failed without a new checkpoint: the newest one, of an earlier start, holds step 2"
    assert lines[-1] == (
        f"Resume with: trivet up {config_file} --set 'redis.url=redis://***@h/0' --set algorithm.name=grpo"
    )
    assert "hidden-word" not in ended.output


def test_what_a_stop_left_is_what_the_disk_has(config_file, run, supervised):
    supervised.outcome = RunFailed("no")
    assert "no checkpoint was written: the run would start from the beginning" in up(config_file).output
    save(run, 2, at=4e9)
    assert (
        f"Failed; the newest checkpoint holds step 2: {run / 'checkpoints' / 'step-000002'}" in up(config_file).output
    )


def test_steps_after_the_newest_checkpoint_are_not_promised(config_file, run, supervised):
    train(run, 2)
    RunLog(run).add_step({"step": 5, "metrics": {}})
    supervised.outcome = RunFailed("no")
    assert "holds step 2; steps 3 to 5 will be trained again" in up(config_file).output


def test_a_plot_that_cannot_be_written_is_a_sentence(config_file, run, supervised, monkeypatch):
    monkeypatch.setattr(command, "plot", report.plot)
    train(run)
    (run / "plot.png").mkdir()
    ended = up(config_file)
    assert ended.exit_code == 0, ended.output
    assert f"{run / 'plot.png'} cannot be written (Is a directory)" in ended.output
    assert "Traceback" not in ended.output


def test_a_message_that_looks_like_markup_stands_as_it_is(config_file):
    ended = up(config_file, "--set", "run.name=[/data]")
    assert ended.exit_code == 2
    assert "run.name is ['/data']" in ended.output
    ended = up(config_file, "--set", "run.name=My run")
    assert "'^[a-z0-9]" in ended.output
    ended = CliRunner().invoke(app, ["up", "[/data/judge]"])
    assert "[/data/judge]" in ended.output
    ended = CliRunner().invoke(app, ["up", str(config_file), "--no-[/such]"])
    assert ended.exit_code == 2
    assert "--no-[/such]" in ended.output
    assert isinstance(ended.exception, SystemExit)


def test_say_prints_what_it_is_given():
    console = Console(file=StringIO(), width=20)
    said = "[bold]cannot read[/] [/data/judge] :smile: " + "x" * 40
    say(console, said)
    assert console.file.getvalue() == said + "\n"
