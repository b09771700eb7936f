import json

import pytest
from trivet.v1 import sample_pb2

from services.common.errors import InvalidData
from services.reward.validate import check_group


def good_group(samples=2):
    return sample_pb2.Group(
        prompt=sample_pb2.Prompt(
            group_id="g1", text="sort 21", metadata_json=json.dumps({"answer": "12"}), group_size=samples
        ),
        samples=[
            sample_pb2.Sample(sample_id=f"g1/{i}", index=i, text="12", token_ids=[5, 6], logprobs=[-0.5, 0.0])
            for i in range(samples)
        ],
    )


def test_a_good_group_passes():
    check_group(good_group())


def test_a_group_of_unknown_size_passes():
    group = good_group()
    group.prompt.group_size = 0
    check_group(group)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lambda g: g.prompt.ClearField("group_id"), "group_id_missing", "group_id"),
        (lambda g: g.ClearField("samples"), "group_size", "samples is empty, expected 2"),
        (lambda g: g.samples.pop(), "group_size", "samples holds 1"),
        (lambda g: setattr(g.samples[1], "index", 0), "sample_index", r"samples\[1\].index is 0"),
        (lambda g: setattr(g.samples[1], "sample_id", "g1/0"), "sample_id", "g1/0"),
        (lambda g: setattr(g.samples[1], "sample_id", ""), "sample_id", "expected one of its own"),
        (lambda g: g.samples[0].logprobs.append(-1.0), "logprobs_rows", "3 values, expected 2"),
        (lambda g: g.samples[1].logprobs.__setitem__(1, float("nan")), "logprob_not_finite", r"logprobs\[1\] is nan"),
        (lambda g: g.samples[0].logprobs.__setitem__(0, float("-inf")), "logprob_not_finite", r"is -inf"),
        (lambda g: g.samples[0].logprobs.__setitem__(0, 0.5), "logprob_out_of_range", "is 0.5"),
        (lambda g: setattr(g.samples[0], "text", "x" * (4 * 2**20 + 1)), "text_too_long", r"samples\[0\].text"),
        (lambda g: setattr(g.prompt, "metadata_json", ""), "metadata_invalid", "expected a JSON object"),
        (lambda g: setattr(g.prompt, "metadata_json", "[1]"), "metadata_invalid", "expected a JSON object"),
        (lambda g: setattr(g.prompt, "metadata_json", '"12"'), "metadata_invalid", "expected a JSON object"),
        (lambda g: setattr(g.prompt, "metadata_json", '{"a": NaN}'), "metadata_invalid", "NaN is not JSON"),
        (lambda g: setattr(g.prompt, "metadata_json", '{"a":' + "[" * 100_000), "metadata_invalid", "recursion"),
    ],
)
def test_a_bad_group_is_named(change, code, words):
    group = good_group()
    change(group)
    with pytest.raises(InvalidData, match=words) as caught:
        check_group(group)
    assert caught.value.code == code
