"""All three services over a real Redis, with crashes on the way: every issued prompt is trained exactly once."""

import time
from collections import Counter
from pathlib import Path

import pytest
import yaml

from services.common.transport.dead_letters import DeadLetters
from services.trainer.checkpoint.directory import Checkpoints
from tests.support.running_system import System

STEPS, GROUPS, SIZE = 16, 4, 4
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture(scope="module")
def finished(quickstart_model, tmp_path_factory):
    """One run that has lost a rollout, its trainer and its Redis on the way."""
    tree = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    del tree["prepare"]
    tree["model"]["path"] = str(quickstart_model)
    tree["data"]["train"]["path"] = str(quickstart_model / "train.jsonl")
    tree["data"]["validation"]["path"] = str(quickstart_model / "validation.jsonl")
    tree["sampling"]["group_size"] = SIZE
    tree["evaluation"] = {"every": 0, "prompts": 8, "samples": 2}
    tree["trainer"] |= {"steps": STEPS, "groups_per_step": GROUPS, "checkpoint_every": 2}
    system = System(tmp_path_factory.mktemp("system"), tree)
    try:
        system.start("redis")
        system.until_redis()
        system.start("rollout-0", "rollout-1", "reward")
        system.until_sampling("rollout-0")
        system.until_sampling("rollout-1")
        system.start("trainer")
        system.until_step(1)
        system.until_busy("rollout-1")
        system.kill("rollout-1")
        system.until_step(5)
        system.kill("trainer")
        system.start("trainer")
        system.until_step(9)
        assert system.running("trainer")
        system.kill("redis")
        time.sleep(10)
        system.start("redis")
        system.until_redis()
        assert system.running("trainer")
        system.until_finished()
        yield system
    finally:
        system.stop()


def test_every_issued_prompt_is_trained_exactly_once(finished):
    entries = finished.run_log.steps()
    assert [entry["step"] for entry in entries] == list(range(1, STEPS + 1))
    trained = Counter(int(group.partition("-")[2]) for entry in entries for group in entry["groups"])
    assert trained == dict.fromkeys(range(STEPS * GROUPS), 1)
    samples = Counter(sample for entry in entries for sample in entry["samples"])
    assert len(samples) == STEPS * GROUPS * SIZE
    assert set(samples.values()) == {1}


def test_the_last_checkpoint_has_nothing_open(finished):
    saved = Checkpoints(finished.config.run.path / "checkpoints", keep=3).latest()
    assert saved.state.step == STEPS
    assert saved.state.ledger.pop("sampling") == [[4, 1.0, 20, pytest.approx(0.99), 16, None]]
    assert saved.state.ledger == {"cursor": STEPS * GROUPS, "outstanding": {}, "withheld": {}, "lost": []}


def test_nothing_is_left_in_redis(finished):
    assert [finished.client.xlen(f"system:{name}") for name in ("prompts", "samples", "scored")] == [0, 0, 0]
    assert DeadLetters(finished.client, "system").read() == []
    assert finished.client.keys("system:blob:*") == []


def test_at_equal_weights_sampler_and_trainer_agree(finished):
    first = finished.run_log.steps()[0]["metrics"]
    assert first["logprob_difference_max"] <= 1e-5
    assert first["sampler_ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert first["routing_agreement"] == 1.0
    assert first["mismatch_kl"] < 1e-8


def test_the_trainer_went_on_from_its_checkpoint(finished):
    log = finished.processes["trainer"].log.read_text(encoding="utf-8")
    assert '"event": "resumed"' in log


def test_the_policy_loads_in_transformers(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved = Checkpoints(finished.config.run.path / "checkpoints", keep=3).latest()
    model = AutoModelForCausalLM.from_pretrained(saved.policy)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(saved.policy))
