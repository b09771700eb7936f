import pytest
from structlog.testing import capture_logs
from trivet.v1 import sample_pb2

from services.common.config import parse_config
from services.trainer.update.learning_signal import LearningSignal

TREE = {
    "run": {"name": "signal"},
    "model": {"path": "none"},
    "data": {"train": {"kind": "jsonl", "path": "none.jsonl"}},
    "reward": {"scorers": [{"name": "exact_match"}]},
    "sampling": {"max_tokens": 8},
}


def signal(**algorithm):
    return LearningSignal(parse_config({**TREE, "algorithm": algorithm}))


def groups(*rewards, lengths=(2, 2)):
    made = []
    for group in rewards:
        samples = [sample_pb2.Sample(token_ids=[1] * length) for length, _ in zip(lengths, group, strict=False)]
        prompt = sample_pb2.Prompt(sampling=sample_pb2.SamplingParameters(max_tokens=8))
        scores = [sample_pb2.Score(reward=reward) for reward in group]
        made.append(sample_pb2.ScoredGroup(group=sample_pb2.Group(prompt=prompt, samples=samples), scores=scores))
    return made


def steps(observed: dict[str, float]) -> float:
    return observed["steps_without_signal"]


def test_steps_in_a_row_without_variance_are_counted_and_one_with_ends_the_row():
    found = signal()
    assert [steps(found.observe(groups((0, 0), (1, 1)))) for _ in range(3)] == [1, 2, 3]
    assert steps(found.observe(groups((0, 0), (0, 1)))) == 0
    assert steps(found.observe(groups((0.5, 0.5)))) == 1


def test_a_warning_comes_with_the_fifth_and_says_what_the_rewards_are():
    found = signal()
    with capture_logs() as logs:
        for _ in range(11):
            found.observe(groups((0, 0), (1, 1)))
    assert [(each["log_level"], each["steps_in_a_row"]) for each in logs] == [("warning", 5), ("warning", 10)]
    assert logs[0]["rewards"] == [0.0, 1.0]


def test_a_value_head_learns_from_different_prompts():
    found = signal(name="ppo")
    assert steps(found.observe(groups((0, 0), (1, 1)))) == 0
    assert steps(found.observe(groups((1, 1), (1, 1)))) == 1


def test_what_overlong_answers_pay_is_a_signal():
    found = signal(overlong_buffer=4)
    assert steps(found.observe(groups((1, 1), lengths=(2, 8)))) == 0
    assert steps(found.observe(groups((1, 1), lengths=(2, 2)))) == 1


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "dpo"])
def test_every_other_algorithm_compares_within_groups(name):
    assert steps(signal(name=name).observe(groups((0, 0), (1, 1)))) == 1
