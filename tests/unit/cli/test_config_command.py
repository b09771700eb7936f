"""`trivet config show`: the configuration in effect, whole and without secrets."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from services.cli.__main__ import app
from services.common.config import load_config, parse_config

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def show(*arguments: str, environment: dict[str, str] | None = None):
    return CliRunner().invoke(app, ["config", "show", *arguments], env=environment)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_what_is_shown_loads_as_the_same_configuration(path: Path) -> None:
    shown = show(str(path))

    assert shown.exit_code == 0
    assert parse_config(yaml.safe_load(shown.output)) == load_config(path)


def test_overrides_and_the_environment_are_in_effect() -> None:
    shown = show(str(CONFIGS[0]), "--set", "trainer.steps=7", environment={"TRIVET__RUN__SEED": "5"})

    tree = yaml.safe_load(shown.output)
    assert (tree["trainer"]["steps"], tree["run"]["seed"]) == (7, 5)


def test_no_secret_is_shown(tmp_path: Path) -> None:
    secrets = ["token-of-sixteen-or-more", "password-of-redis", "key-of-the-store", "key-of-the-judge"]
    file = tmp_path / "run.yaml"
    tree = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text(encoding="utf-8"))
    tree["trainer"]["server"] = {"token": secrets[0]}
    tree["redis"] = {"url": f"redis://:{secrets[1]}@host:6379/0"}
    tree["blobs"] = {"url": f"s3://user:{secrets[2]}@bucket/prefix"}
    tree["reward"]["scorers"] = [{"name": "exact_match", "options": {"api_key": secrets[3]}}]
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")

    shown = show(str(file))

    assert shown.exit_code == 0
    assert not [secret for secret in secrets if secret in shown.output]
    assert yaml.safe_load(shown.output)["redis"]["url"] == "redis://***@host:6379/0"


def test_what_cannot_be_used_is_refused_by_key_with_the_status_of_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run: {name: my-run, colour: red}", encoding="utf-8")

    refused = show(str(file))

    assert refused.exit_code == 2
    assert "run.colour is not a known key" in refused.output
