"""What a command leaves with when there is nothing to report, and when it is interrupted: docs/troubleshooting.md."""

import subprocess
from pathlib import Path
from shutil import copy

import pytest
import yaml
from typer.testing import CliRunner

from services.cli.app import app
from services.common.run_files.recorded_steps import CONFIG_FILE, RECORD_FILE, RECORDED_DIRECTORY, step_directory

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
RECORD = Path(__file__).parents[1] / "common" / "run_files" / "before" / RECORD_FILE
NO_RESULT, INTERRUPTED = 2, 130


def status(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def config(tmp_path):
    """Of a run that nothing has to be prepared for."""
    tree = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    tree.pop("prepare", None)
    tree["run"]["directory"] = str(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ["rerun", "no/such/run", "1"],
        ["compare", "no/such/run", "--algorithms", "grpo"],
        ["compare", "--train", "no/such.yaml", "--algorithms", "grpo"],
        ["audit", "no/such.yaml"],
        ["check", "no/such.yaml"],
        ["config", "show", "no/such.yaml"],
        ["up", "no/such.yaml"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_without_anything_to_read_it_is_two(arguments):
    result = status(*arguments)
    assert result.exit_code == NO_RESULT, result.output
    assert "no/such" in result.output


@pytest.mark.parametrize(
    ("arguments", "process"),
    [
        (["rerun", "RUN", "1"], "services.trainer.rerun"),
        (["compare", "RUN", "--algorithms", "grpo"], "services.trainer.compare"),
        (["audit", "CONFIG", "--rollout", "127.0.0.1:9"], "services.trainer.audit"),
        (["audit", "CONFIG"], "the rollout"),
    ],
    ids=lambda given: given if isinstance(given, str) else given[0],
)
def test_where_the_process_cannot_be_started_it_is_two(config, tmp_path, arguments, process):
    """Its log would lie in a directory that is a file."""
    run = tmp_path / "quickstart"
    step = step_directory(run / RECORDED_DIRECTORY, 1)
    step.mkdir(parents=True)
    copy(RECORD, step / RECORD_FILE)
    copy(config, step / CONFIG_FILE)
    (run / "logs").touch()
    result = status(*({"RUN": run, "CONFIG": config}.get(each, each) for each in arguments))
    assert result.exit_code == NO_RESULT, result.output
    assert f"{process} cannot be started" in result.output


@pytest.mark.parametrize("command", ["audit", "check"])
def test_after_ctrl_c_it_is_130(config, monkeypatch, command):
    def start(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", start)
    result = status(command, config)
    assert result.exit_code == INTERRUPTED, result.output
