import json

import pytest
from trivet.v1 import sample_pb2

from services.common.errors import InvalidData
from services.reward.validate import check_texts


def group():
    return sample_pb2.Group(
        prompt=sample_pb2.Prompt(group_id="g1", text="sort 21", metadata_json=json.dumps({"answer": "12"})),
        samples=[sample_pb2.Sample(sample_id=f"g1/0/{index}", index=index, text="12") for index in range(2)],
    )


def test_texts_and_metadata_pass():
    check_texts(group())


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (
            lambda g: setattr(g.samples[0], "text", "x" * (4 * 2**20 + 1)),
            "text_too_long",
            "text of sample g1/0/0",
        ),
        (lambda g: setattr(g.prompt, "metadata_json", ""), "metadata_invalid", "expected a JSON object"),
        (lambda g: setattr(g.prompt, "metadata_json", "[1]"), "metadata_invalid", "expected a JSON object"),
        (lambda g: setattr(g.prompt, "metadata_json", '"12"'), "metadata_invalid", "expected a JSON object"),
        (lambda g: setattr(g.prompt, "metadata_json", '{"a": NaN}'), "metadata_invalid", "NaN is not JSON"),
        (lambda g: setattr(g.prompt, "metadata_json", '{"a":' + "[" * 100_000), "metadata_invalid", "recursion"),
    ],
)
def test_a_bad_group_is_named(change, code, words):
    changed = group()
    change(changed)
    with pytest.raises(InvalidData, match=words) as caught:
        check_texts(changed)
    assert caught.value.code == code
