import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from services.common.config import ConfigError, load_config, parse_config
from services.common.config.overrides import OVERRIDES_VARIABLE
from services.common.run_files.lineage import config_version
from services.common.run_files.recorded_steps import write_config
from services.common.secrets import hidden, hidden_override, without_secrets

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
SECRET = "hunter2"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://:hunter2@host:6379/0", "redis://***@host:6379/0"),
        ("rediss://me:hunt@er2@host/0 and s3://key:word@bucket/p", "rediss://***@host/0 and s3://***@bucket/p"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("mail me@host", "mail me@host"),
        ("{'url': 'redis://:hunter2@h'}", "{'url': 'redis://***@h'}"),
    ],
)
def test_addresses_are_shown_without_their_password(text, shown):
    assert without_secrets(text) == shown


def test_values_are_hidden_by_the_names_of_their_keys():
    tree = {"token": "x", "max_tokens": 3, "api_key": ["x"], "options": {"judge_password": "x", "n": 1}, "secret": None}
    assert hidden(tree) == {
        "token": "***",
        "max_tokens": 3,
        "api_key": "***",
        "options": {"judge_password": "***", "n": 1},
        "secret": None,
    }
    assert hidden_override("trainer.server.token=hunter2") == "trainer.server.token=***"
    assert hidden_override("redis.url=redis://:hunter2@h/0") == "redis.url=redis://***@h/0"
    assert hidden_override("trainer.server={token: hunter2, host: h}") == "trainer.server={token: ***, host: h}"
    assert hidden_override("trainer.steps=3") == "trainer.steps=3"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.server.token=hunter2", "trainer.server.token is '***': String should have at least 16 characters"),
        ("trainer.server={token: hunter2, hots: x}", "trainer.server.hots is not a known key"),
        ("trainer.server=[hunter2]", "trainer.server is a list, expected a section"),
        ("redis.url=http://:hunter2@h/0", "redis.url: expected a redis://"),
        ("redis.url=redis://:hunter2#x@h:6379/0", "percent-encoded"),
        ("redis=redis://:hunter2@h/0", "redis is a str, expected a section with keys of its own"),
        ("redis.url={a: redis://:hunter2@h/0}", "redis.url is {'a': 'redis://***@h/0'}"),
        ("redis.url='redis://:hunter2@h/0", "override redis.url=…: is not YAML (line 1"),
        ("redis.url: redis://:hunter2@h/0", "expected section.key=value"),
        ("redis.url.x=1", "url is not a section"),
    ],
)
def test_no_refusal_shows_a_secret(override, sentence):
    before = ["redis.url=redis://:hunter2@h/0"] if override.startswith("redis.url.x") else []
    with pytest.raises(ConfigError) as refusal:
        load_config(QUICKSTART, [*before, override])
    assert sentence in str(refusal.value)
    assert SECRET not in str(refusal.value)
    assert refusal.value.__cause__ is None


def test_a_file_that_is_not_yaml_is_placed_and_not_quoted(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("redis:\n  url: 'redis://:hunter2@h/0\nrun: {name: x}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"is not YAML \(line \d+, column \d+: ") as refusal:
        load_config(file)
    assert SECRET not in str(refusal.value)


def with_secrets() -> dict:
    tree = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    tree["redis"] = {"url": "redis://:hunter2@127.0.0.1:1/0", "retry_seconds": 0.5}
    tree["blobs"] = {"url": "s3://me:hunter2@bucket/x"}
    tree["trainer"]["server"] = {"token": "hunter2-hunter2-hunter2"}
    tree["reward"]["scorers"] = [{"name": "exact_match", "options": {"api_key": "hunter2"}}]
    return tree


def test_what_is_recorded_and_printed_of_a_configuration_holds_none(tmp_path):
    config = parse_config(with_secrets())
    write_config(tmp_path, config)
    assert SECRET not in (tmp_path / "config.yaml").read_text(encoding="utf-8")
    assert "hunter2@" not in repr(config)
    assert "hunter2-hunter2" not in repr(config)
    other = with_secrets()
    other["redis"]["url"] = "redis://:another@127.0.0.1:1/0"
    assert config_version(parse_config(other)) == config_version(config)


def test_a_service_shows_none_in_its_arguments_log_and_last_words(tmp_path):
    file = tmp_path / "run.yaml"
    tree = with_secrets()
    tree["reward"]["scorers"] = [{"name": "exact_match"}]
    del tree["redis"]
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    overrides = ["redis.url=redis://:hunter2@127.0.0.1:1/0", "redis.retry_seconds=0.2", "run.name=quiet_run"]
    service = subprocess.Popen(
        [sys.executable, "-m", "services.reward", "--config", str(file)],
        env={**os.environ, OVERRIDES_VARIABLE: json.dumps(overrides)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 20
    arguments = ""
    while "services.reward" not in arguments:
        assert time.monotonic() < deadline
        arguments = Path(f"/proc/{service.pid}/cmdline").read_text(encoding="utf-8")
    assert SECRET not in arguments
    said = service.communicate(timeout=60)[0]
    assert service.returncode == 1
    assert SECRET not in said
    last = json.loads([line for line in said.splitlines() if line.startswith("{")][-1])
    assert (last["event"], last["exit_code"], last["run"]) == ("ended", 1, "quiet_run")
    assert "127.0.0.1:1" in last["reason"]
