import pytest
from trivet.v1 import sample_pb2

from services.common.config import SamplingConfig
from services.common.errors import InvalidData
from services.rollout.groups.admission import check_prompt, is_captured
from services.rollout.vllm_engine.limits import truncates
from tests.support.rollout.fakes import FakeEngine, make_prompt


def sampling(**changes):
    fields = {"temperature": 1.0, "top_k": 5, "top_p": 1.0, "max_tokens": 4}
    return sample_pb2.SamplingParameters(**{**fields, **changes})


def test_a_sound_prompt_passes():
    check_prompt(make_prompt(), FakeEngine())
    check_prompt(make_prompt(token_ids=[0, 99], sampling=sampling(max_tokens=14)), FakeEngine())


def test_greedy_is_for_evaluation():
    greedy = make_prompt(purpose=sample_pb2.PURPOSE_EVALUATION, sampling=sampling(temperature=0, top_k=0))
    check_prompt(greedy, FakeEngine())
    assert not is_captured(greedy)
    assert is_captured(make_prompt())


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"group_id": ""}, "group_id", "group_id is ''"),
        ({"group_id": "g\0"}, "group_id", "ASCII characters"),
        ({"group_id": "1" * 5000}, "group_id", "1 to 128"),
        ({"sampling": sampling(seed=2**64 - 1)}, "sampling_unsupported", "sampling.seed is 18446744073709551615"),
        ({"group_size": 0}, "group_size", "group_size is 0"),
        ({"group_size": 5000}, "group_size", "group_size is 5000"),
        ({"token_ids": []}, "prompt_empty", "token_ids is empty"),
        ({"token_ids": [1] * 13}, "prompt_too_long", "13 tokens .* at most 16"),
        ({"token_ids": [1, 100]}, "token_out_of_range", "holds 100, expected 0 to 99"),
        ({"token_ids": [-1, 2]}, "token_out_of_range", "holds -1"),
        ({"sampling": sampling(max_tokens=0)}, "max_tokens", "max_tokens is 0"),
        ({"sampling": sampling(temperature=0)}, "sampling_unsupported", "temperature is 0"),
        (
            {"sampling": sampling(temperature=0.001)},
            "sampling_unsupported",
            "temperature is 0.001, expected 0 or 0.01 to 2",
        ),
        ({"sampling": sampling(temperature=0.00999)}, "sampling_unsupported", "temperature is 0.00999"),
        ({"sampling": sampling(temperature=2.001)}, "sampling_unsupported", "temperature is 2.001"),
        ({"sampling": sampling(temperature=-1)}, "sampling_unsupported", "temperature is -1"),
        ({"sampling": sampling(temperature=float("nan"))}, "sampling_unsupported", "temperature is nan"),
        ({"sampling": sampling(top_p=0)}, "sampling_unsupported", "top_p is 0"),
        ({"sampling": sampling(top_p=1.5)}, "sampling_unsupported", "top_p is 1.5"),
    ],
)
def test_what_cannot_be_sampled_is_named(changes, code, words):
    with pytest.raises(InvalidData, match=words) as failure:
        check_prompt(make_prompt(**changes), FakeEngine())
    assert failure.value.code == code


@pytest.mark.parametrize(
    "values", [{"temperature": 0.01}, {"temperature": 2.0}, {"top_p": 0.9999999}, {"top_p": 1e-40}]
)
def test_what_the_configuration_lets_pass_can_be_sampled_in_float32(values):
    """A prompt carries the numbers in float32: 0.01 arrives as 0.0099999998."""
    checked = SamplingConfig(group_size=1, **values)
    carried = sampling(temperature=checked.temperature, top_p=checked.top_p)
    check_prompt(make_prompt(sampling=carried), FakeEngine())
    assert truncates(sampling(top_k=0, temperature=checked.temperature, top_p=checked.top_p)) == checked.truncates


def test_the_engine_has_a_say():
    engine = FakeEngine()
    engine.refusal_reason = "no candidate capture"
    with pytest.raises(InvalidData, match="no candidate capture"):
        check_prompt(make_prompt(), engine)
