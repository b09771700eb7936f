"""All three services over a real Redis, with crashes on the way: every issued prompt is trained exactly once."""

from collections import Counter

import pytest

from services.common.transport.dead_letters import DeadLetters
from tests.support.runs.disturbed_run import GROUPS, MAX_TOKENS_THEN, SIZE, STEPS, THEN


def test_every_issued_prompt_is_trained_exactly_once(finished):
    entries = finished.system.run_log.steps()
    assert [entry["step"] for entry in entries] == list(range(1, STEPS + 1))
    trained = Counter(int(group.partition("-")[2]) for entry in entries for group in entry["groups"])
    groups = GROUPS * finished.resumed + THEN * (STEPS - finished.resumed)
    assert trained == dict.fromkeys(range(groups), 1)
    samples = Counter(sample for entry in entries for sample in entry["samples"])
    assert len(samples) == groups * SIZE
    assert set(samples.values()) == {1}


def test_the_last_checkpoint_has_nothing_open(finished):
    saved = finished.checkpoints.latest()
    assert saved.state.step == STEPS
    settings = [SIZE, 1.0, 20, pytest.approx(0.99)]
    assert saved.state.ledger == {
        "cursor": GROUPS * finished.resumed + THEN * (STEPS - finished.resumed),
        "outstanding": {},
        "withheld": {},
        "lost": [],
        "sampling": [[*settings, 16, None], [*settings, MAX_TOKENS_THEN, None]],
    }


def test_nothing_is_left_in_redis(finished):
    client = finished.system.client
    assert [client.xlen(f"system:{name}") for name in ("prompts", "samples", "scored")] == [0, 0, 0]
    assert DeadLetters(client, "system").read() == []
    assert client.keys("system:blob:*") == []


def test_at_equal_weights_sampler_and_trainer_agree(finished):
    first = finished.system.run_log.steps()[0]["metrics"]
    assert first["logprob_difference_max"] <= 1e-5
    assert first["sampler_ratio_mean"] == pytest.approx(1, abs=1e-4)
    assert first["routing_agreement"] == 1.0
    assert first["mismatch_kl"] < 1e-8


def test_the_trainer_resumed_after_each_crash(finished):
    assert len(finished.events("resumed")) == 2


def test_the_policy_loads_in_transformers(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved = finished.checkpoints.latest()
    model = AutoModelForCausalLM.from_pretrained(saved.policy)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(saved.policy))
