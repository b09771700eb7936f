import json

import pytest

from services.common.config import DataConfig
from services.common.errors import InvalidData
from services.trainer.data import load_prompts


class Words:
    """A tokenizer: one token a word."""

    def apply_chat_template(self, conversation, **options):
        return [len(word) for message in conversation for word in message["content"].split()]

    eos_token_id = 1

    def encode(self, text, *, add_special_tokens=True):
        return [*([0] if add_special_tokens else []), *(len(word) for word in text.split())]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"kind": "jsonl", "path": str(path)}


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "train.jsonl", [{"prompt": f"sort {n}", "answer": n} for n in range(50)])


def load(seed=1, **settings):
    return load_prompts(DataConfig(**settings), Words(), seed)


def test_the_cursor_alone_decides_the_row(source):
    once, again, other = load(train=source), load(train=source), load(train=source, seed=2)
    size = len(once.train)
    order = [once.train[issue].prompt_id for issue in range(2 * size)]
    assert order == [again.train[issue].prompt_id for issue in range(2 * size)]
    assert order != [other.train[issue].prompt_id for issue in range(2 * size)]
    assert sorted(order[:size]) == sorted(order[size:])
    assert order[:size] != order[size:]


def test_without_a_validation_source_a_share_is_held_out(source):
    data = load(train=source, validation_ratio=0.2)
    assert (len(data.train), len(data.validation)) == (40, 10)
    assert not {row.text for row in data.train.rows} & {row.text for row in data.validation.rows}


def test_a_prompt_in_both_splits_is_only_held_out(tmp_path, source):
    validation = write(tmp_path / "validation.jsonl", [{"prompt": "sort 3"}, {"prompt": "sort 99"}])
    data = load(train=source, validation=validation)
    assert (len(data.train), data.dropped) == (49, 1)
    assert "sort 3" not in {row.text for row in data.train.rows}


def test_metadata_is_everything_beside_the_prompt(source):
    row = load(train=source, shuffle=False).train[0]
    assert json.loads(row.metadata_json).keys() == {"id", "answer"}


def test_chat_template_or_plain_text(source):
    assert load(train=source, system_prompt="be brief").train[0].token_ids[:2] == [2, 5]
    assert load(train=source, chat_template=False).train[0].token_ids[0] == 0


def test_a_long_prompt_is_refused_by_name_or_dropped_and_counted(tmp_path):
    rows = [{"prompt": "a b"}, {"prompt": "a b c d"}, {"prompt": "c d"}]
    source = write(tmp_path / "d.jsonl", rows)
    with pytest.raises(InvalidData, match=r"row 1: prompt has 4 tokens, at most 3 allowed") as refusal:
        load(train=source, max_prompt_tokens=3)
    assert refusal.value.code == "prompt_too_long"
    assert load(train=source, max_prompt_tokens=3, too_long="drop").dropped == 1


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([{"question": "x"}] * 3, "data_prompt"),
        ([{"prompt": ""}] * 3, "data_prompt"),
        ([{"prompt": "x", "id": 1}, {"prompt": "y", "id": 1}, {"prompt": "z", "id": 1}], "data_duplicate"),
        ([{"prompt": "x"}] * 3, "data_empty"),
        ([{"prompt": "x", "id": 0, "value": float("nan")}, {"prompt": "y", "id": 1}], "data_metadata"),
    ],
)
def test_bad_rows_are_named(tmp_path, rows, code):
    with pytest.raises(InvalidData) as refusal:
        load(train=write(tmp_path / "d.jsonl", rows), validation_ratio=0.4)
    assert refusal.value.code == code


def test_a_line_that_is_not_json_is_named(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "x"}\n{"prompt"\n', encoding="utf-8")
    with pytest.raises(InvalidData, match="line 2 is not JSON"):
        load(train={"kind": "jsonl", "path": str(tmp_path / "d.jsonl")})


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidData, match="does not exist"):
        load(train={"kind": "jsonl", "path": str(tmp_path / "none.jsonl")})


def test_reasoning_gym_rows_carry_their_answer():
    source = {"kind": "reasoning_gym", "path": "chain_sum", "size": 20, "options": {"seed": 3}}
    data = load(train=source, validation={**source, "options": {"seed": 1000}}, max_prompt_tokens=64)
    metadata = json.loads(data.train[0].metadata_json)
    assert metadata["metadata"]["source_dataset"] == "chain_sum"
    assert metadata["answer"]


def test_hf_dataset_on_disk(tmp_path):
    import datasets

    rows = datasets.Dataset.from_list([{"prompt": f"sort {n}", "answer": str(n)} for n in range(10)])
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "data"))
    data = load(train={"kind": "hf", "path": str(tmp_path / "data")}, validation_ratio=0.2)
    assert len(data.train) == 8


def test_the_data_version_tells_contents_apart(tmp_path, source):
    other = write(tmp_path / "other.jsonl", [{"prompt": f"sort {n}", "answer": n + 1} for n in range(50)])
    assert load(train=source).version == load(train=source).version != load(train=other).version
