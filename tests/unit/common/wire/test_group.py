import pytest
from trivet.v1 import sample_pb2

from services.common.errors import InvalidData
from services.common.wire.group import check_group


def group():
    return sample_pb2.Group(
        prompt=sample_pb2.Prompt(group_id="g1", group_size=2, attempt=3),
        samples=[
            sample_pb2.Sample(sample_id=f"g1/3/{index}", index=index, token_ids=[5, 6], logprobs=[-0.5, 0.0])
            for index in range(2)
        ],
    )


def test_a_good_group_passes_also_in_another_order_and_of_a_size_that_nobody_said():
    check_group(group())
    changed = group()
    changed.samples.reverse()
    changed.prompt.group_size = 0
    check_group(changed)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lambda g: g.prompt.ClearField("group_id"), "group_id", "group_id is empty"),
        (lambda g: g.ClearField("samples"), "group_size", "has 0 samples, expected 2"),
        (lambda g: (g.ClearField("samples"), g.prompt.ClearField("group_size")), "group_size", "at least one"),
        (lambda g: g.samples.pop(), "group_size", "has 1 samples, expected 2"),
        (lambda g: setattr(g.samples[1], "index", 0), "sample_index", r"index \[0, 0\], expected 0 to 1"),
        (lambda g: setattr(g.samples[1], "sample_id", "g1/3/0"), "sample_id", "is 'g1/3/0', expected 'g1/3/1'"),
        (lambda g: setattr(g.samples[1], "sample_id", ""), "sample_id", "is '', expected 'g1/3/1'"),
        (lambda g: g.samples[0].logprobs.append(-1.0), "logprobs_rows", "3 values, expected 2"),
        (lambda g: g.samples[1].logprobs.__setitem__(1, float("nan")), "logprob_not_finite", r"\[1\] is nan"),
        (lambda g: g.samples[0].logprobs.__setitem__(0, float("-inf")), "logprob_not_finite", "is -inf"),
        (lambda g: g.samples[0].logprobs.__setitem__(0, 0.5), "logprob_out_of_range", "is 0.5"),
        (lambda g: g.samples[0].logprobs.__setitem__(0, -1e30), "logprob_out_of_range", "is -1e[+]30"),
    ],
)
def test_a_bad_group_is_named(change, code, words):
    changed = group()
    change(changed)
    with pytest.raises(InvalidData, match=words) as caught:
        check_group(changed)
    assert caught.value.code == code
