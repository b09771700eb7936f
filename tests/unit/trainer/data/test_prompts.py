import datetime
import json

import pytest

from services.common.config import DataConfig
from services.common.errors import InvalidData
from services.trainer.data.prompts import load_prompts
from tests.support.words import Words


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
    order = [once.train[request].prompt_id for request in range(2 * size)]
    assert order == [again.train[request].prompt_id for request in range(2 * size)]
    assert order != [other.train[request].prompt_id for request in range(2 * size)]
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


def test_metadata_is_everything_but_the_prompt(source):
    row = load(train=source, shuffle=False).train[0]
    assert json.loads(row.metadata_json).keys() == {"id", "answer"}


def test_chat_template_or_plain_text(source):
    assert load(train=source, system_prompt="be brief").train[0].token_ids[:2] == [2, 5]
    assert load(train=source, chat_template=False).train[0].token_ids[0] == 0


def test_a_long_prompt_is_refused_by_name_or_dropped_and_counted(tmp_path):
    rows = [{"prompt": "a b"}, {"prompt": "a b c d"}, {"prompt": "c d"}]
    source = write(tmp_path / "d.jsonl", rows)
    with pytest.raises(InvalidData, match=r"d.jsonl line 2: prompt has 4 tokens, at most 3 allowed") as refusal:
        load(train=source, max_prompt_tokens=3)
    assert refusal.value.code == "prompt_too_long"
    assert load(train=source, max_prompt_tokens=3, too_long="drop").dropped == 1


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([{"question": "x"}] * 3, "data_column"),
        ([{"prompt": ""}] * 3, "data_prompt"),
        ([{"prompt": "x", "id": 1}, {"prompt": "y", "id": 1}, {"prompt": "z", "id": 1}], "data_duplicate"),
        ([{"prompt": "x"}] * 3, "data_empty"),
    ],
)
def test_bad_rows_are_named(tmp_path, rows, code):
    with pytest.raises(InvalidData) as refusal:
        load(train=write(tmp_path / "d.jsonl", rows), validation_ratio=0.4)
    assert refusal.value.code == code


GOOD = [{"prompt": "a"}, {"prompt": "b"}]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "b \ud83d"}, r"d.jsonl line 3: prompt holds '\\ud83d' at character 2, half of a surrogate pair"),
        ({"prompt": "b", "id": "\udc00"}, r"d.jsonl line 3: id holds '\\udc00' at character 0"),
        ({"prompt": 7}, "d.jsonl line 3: prompt is 7, expected a non-empty string"),
        (
            {"prompt": "b", "page": "x" * 2**22},
            r"d.jsonl line 3: \d+ bytes of other columns, at most 4194304 can be scored",
        ),
        ({"question": "b", "answer": 1}, r"line 3: there is no column 'prompt' \(data.train.prompt_field\), only id, "),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_file_line_and_column(tmp_path, row, words):
    source = write(tmp_path / "d.jsonl", [*GOOD, row, *GOOD])
    with pytest.raises(InvalidData, match=words):
        load(train=source)
    with pytest.raises(InvalidData, match=words.replace("data.train", "data.validation")):
        load(train=write(tmp_path / "other.jsonl", GOOD), validation=source)


def test_of_many_rows_that_cannot_be_used_the_first_is_reported_and_the_others_counted(tmp_path):
    rows = [*GOOD, {"prompt": ""}, *GOOD, {"prompt": None}, {"prompt": "\ud83d"}]
    with pytest.raises(InvalidData, match=r"line 3: prompt is '', .*; 2 more rows cannot be used, .*d.jsonl line 6"):
        load(train=write(tmp_path / "d.jsonl", rows))


def test_a_file_that_is_not_utf_8_is_named_by_line(tmp_path):
    (tmp_path / "d.jsonl").write_bytes('{"prompt": "cafe"}\n\n{"prompt": "café"}\n'.encode("latin-1"))
    with pytest.raises(InvalidData, match=r"data.train.path: .*d.jsonl line 3 is not UTF-8 \(byte 0xe9 at position 15"):
        load(train={"kind": "jsonl", "path": str(tmp_path / "d.jsonl")})


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "x"}\n{"prompt": "y"}\n', encoding="utf-8-sig")
    assert len(load(train={"kind": "jsonl", "path": str(tmp_path / "d.jsonl")}).train) == 1


@pytest.mark.parametrize("line", ["[" * 100_000, "1" * 5_000, '"text"', "[1]"])
def test_a_line_that_is_no_object_is_named(tmp_path, line):
    (tmp_path / "d.jsonl").write_text('{"prompt": "x"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(InvalidData, match="d.jsonl line 2 is"):
        load(train={"kind": "jsonl", "path": str(tmp_path / "d.jsonl")})


def test_columns_that_nobody_uses_may_hold_anything(tmp_path):
    import datasets

    day = datetime.datetime(2026, 1, 2, 3, 4, 5)
    rows = [
        {
            "prompt": f"sort {n}",
            "made": day,
            "score": float("nan"),
            "picture": b"\x89PNG",
            "answer": n,
            "nested": {"at": [day]},
        }
        for n in range(3)
    ]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "data"))
    data = load(train={"kind": "hf", "path": str(tmp_path / "data")}, shuffle=False)
    assert json.loads(data.train[0].metadata_json) == {
        "id": int(data.train[0].prompt_id),
        "answer": int(data.train[0].prompt_id),
        "made": "2026-01-02T03:04:05",
        "score": None,
        "nested": {"at": ["2026-01-02T03:04:05"]},
    }
    assert data.columns_left_out == {"picture"}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "has no rows that can be used, expected at least two"),
        ([{"prompt": "a"}], "has one row that can be used, expected at least two: one is held out"),
        ([{"prompt": "a"}, {"prompt": "a b c d"}], "has one row .*; 1 are too long"),
    ],
)
def test_too_few_rows_are_told_from_rows_that_are_too_long(tmp_path, rows, words):
    with pytest.raises(InvalidData, match=words) as refusal:
        load(train=write(tmp_path / "d.jsonl", rows), too_long="drop", max_prompt_tokens=3)
    assert refusal.value.code == "data_empty"
    assert "data.validation" in str(refusal.value)


def test_what_is_too_long_is_left_out_before_a_share_is_held_out(tmp_path):
    rows = [{"prompt": f"sort {n}", "answer": n} for n in range(50)]
    held_out = {row.text for row in load(train=write(tmp_path / "short.jsonl", rows)).validation.rows}
    for row in rows:
        if row["prompt"] in held_out:
            row["prompt"] += " and more and more and more"
    data = load(train=write(tmp_path / "long.jsonl", rows), too_long="drop", max_prompt_tokens=3)
    assert len(data.validation) == len(held_out)
    assert data.dropped == len(held_out)
    assert len(data.train) == 50 - 2 * len(held_out)


def test_a_split_and_its_version_stay_what_they_were(source):
    """As the first release made them: a run that resumes over unchanged data finds the rows that it left."""
    data = load(train=source, validation_ratio=0.1)
    assert [row.prompt_id for row in data.validation.rows] == ["15", "23", "25", "30", "37"]
    assert data.version == "96b69eb7a59a1ef5"


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
