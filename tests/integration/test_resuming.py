"""A run whose newest checkpoint is damaged and whose configuration changes while it is away: it resumes, and ends."""

import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tests.support.running_system import System

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
STEPS, GROUPS, THEN = 8, 8, 4


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.fixture(scope="module")
def finished(quickstart_model, tmp_path_factory):
    tree = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    del tree["prepare"]
    tree["model"]["path"] = str(quickstart_model)
    tree["data"]["train"]["path"] = str(quickstart_model / "train.jsonl")
    tree["data"]["validation"]["path"] = str(quickstart_model / "validation.jsonl")
    tree["sampling"]["group_size"] = 4
    tree["algorithm"] = {"name": "dr_grpo"}
    tree["evaluation"] = {"every": 0, "prompts": 8, "samples": 0}
    tree["trainer"] |= {"steps": STEPS, "groups_per_step": GROUPS, "checkpoint_every": 2}
    system = System(tmp_path_factory.mktemp("resuming"), tree)
    try:
        system.start("redis")
        system.until_redis()
        system.start("rollout-0", "reward", "trainer")
        system.until_step(5)
        system.kill("trainer")
        checkpoints = system.config.run.path / "checkpoints"
        flip(checkpoints / "step-000004" / "policy" / "model.safetensors")
        now = yaml.safe_load(system.file.read_text(encoding="utf-8"))
        now["trainer"] |= {"groups_per_step": THEN, "max_staleness": 0}
        now["sampling"]["max_tokens"] = 8
        system.file.write_text(yaml.safe_dump(now), encoding="utf-8")
        system.start("trainer")
        system.until_finished()
        yield system
    finally:
        system.stop()


def test_it_resumes_from_the_one_before_and_keeps_the_damaged_one(finished):
    checkpoints = finished.config.run.path / "checkpoints"
    assert (checkpoints / "damaged-step-000004" / "trainer.json").is_file()
    log = [json.loads(line) for line in finished.processes["trainer"].log.read_text().splitlines() if line[:1] == "{"]
    (resumed,) = [entry for entry in log if entry["event"] == "resumed"]
    assert resumed["checkpoint"].endswith("step-000002")
    assert (checkpoints / "step-000008").is_dir()


def test_every_step_has_the_size_of_its_configuration_and_no_group_is_trained_twice(finished):
    entries = finished.run_log.steps()
    assert [len(entry["groups"]) for entry in entries] == [GROUPS] * 2 + [THEN] * (STEPS - 2)
    trained = Counter(group for entry in entries for group in entry["groups"])
    assert set(trained.values()) == {1}
    state = json.loads((finished.config.run.path / "checkpoints" / "step-000008" / "trainer.json").read_text())
    assert state["ledger"]["outstanding"] == {}


def test_no_group_is_older_than_the_new_bound(finished):
    assert all(entry["metrics"]["staleness_max"] <= 0 for entry in finished.run_log.steps()[2:])
