import json

import datasets
import pytest

from services.common.config import Config, parse_config
from services.common.errors import InvalidData
from services.trainer.data.preferences import load_preferences
from tests.support.trainer.small_tokenizers import small_tokenizer
from tests.support.words import Words

ROWS = [{"prompt": f"sort {n}", "chosen": f"yes {n}", "rejected": "no"} for n in range(20)]


def load(tmp_path, rows, seed=1, sampling=None, tokenizer=None, **data):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_preferences(configuration(path, seed, sampling or {}, data), tokenizer or Words())


def configuration(path, seed, sampling, data) -> Config:
    preferences = {"kind": "jsonl", "path": str(path), **data.pop("source", {})}
    return parse_config(
        {
            "run": {"name": "pairs", "seed": seed},
            "model": {"path": "models/none"},
            "data": {"preferences": preferences, **data},
            "algorithm": {"name": "dpo"},
            "sampling": sampling,
        }
    )


def test_a_row_becomes_prompt_and_two_answers_that_end(tmp_path):
    data = load(tmp_path, ROWS)
    row = data.train[0]
    number = row.text.removeprefix("sort ")
    assert row.prompt_token_ids == [4, len(number)]
    assert row.chosen_token_ids == [3, len(number), Words.eos_token_id]
    assert row.rejected_token_ids == [2, Words.eos_token_id]
    assert len(data.train) == 19
    assert len(data.validation) == 1
    assert data.dropped == 0


def test_the_seed_alone_decides_the_order_and_what_is_held_out(tmp_path):
    once, again, other = load(tmp_path, ROWS), load(tmp_path, ROWS), load(tmp_path, ROWS, seed=2)
    order = [once.train[request].pair_id for request in range(38)]
    assert order == [again.train[request].pair_id for request in range(38)]
    assert order != [other.train[request].pair_id for request in range(38)]
    assert once.version == again.version
    held_out = {row.text for row in once.validation.rows}
    assert not held_out & {row.text for row in once.train.rows}


def test_no_prompt_is_on_both_sides(tmp_path):
    twins = [{**row, "prompt": f"sort {n // 2}"} for n, row in enumerate(ROWS)]
    data = load(tmp_path, twins, validation_ratio=0.3)
    assert not {row.text for row in data.validation.rows} & {row.text for row in data.train.rows}
    assert data.dropped == 20 - len(data.train) - len(data.validation) > 0


def test_conversations_share_their_beginning(tmp_path):
    question = [{"role": "user", "content": "one two"}]
    rows = [
        {
            "chosen": [*question, {"role": "assistant", "content": f"good {n}"}],
            "rejected": [*question, {"role": "assistant", "content": "bad"}],
        }
        for n in range(4)
    ]
    rows[1] = {**rows[1], "prompt": [{"role": "user", "content": "three"}, {"role": "user", "content": "four"}]}
    data = load(tmp_path, rows, validation_ratio=0.25, shuffle=False)
    rows = {row.pair_id: row for row in [*data.train.rows, *data.validation.rows]}
    assert rows["1"].text == "three\nfour"
    assert rows["1"].chosen == "good 1"
    assert {row.text for row in rows.values()} <= {"one two", "three\nfour"}


def test_other_field_names(tmp_path):
    rows = [{"q": row["prompt"], "good": row["chosen"], "bad": row["rejected"]} for row in ROWS]
    source = {"prompt_field": "q", "chosen_field": "good", "rejected_field": "bad", "size": 10}
    assert len(load(tmp_path, rows, source=source).train) == 9


def test_a_hugging_face_dataset_gives_the_same_pairs(tmp_path):
    datasets.DatasetDict({"pairs": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "hub"))
    expected = load(tmp_path, ROWS)
    source = {"kind": "hf", "path": str(tmp_path / "hub"), "split": "pairs"}
    found = load_preferences(configuration(tmp_path, 1, {}, {"source": source}), Words())
    assert found.train.rows == expected.train.rows
    assert found.version == expected.version


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (
            {"chosen": "no"},
            "data_pair",
            "pairs.jsonl line 4: chosen and rejected are the same, expected",
        ),
        ({"chosen": ""}, "data_pair", "line 4: chosen is .*, expected a non-empty text or messages"),
        ({"rejected": None}, "data_pair", "line 4: rejected is None, expected a non-empty text"),
        ({"rejected": [{"role": "user", "content": "x"}]}, "data_pair", "rejected ends with role 'user'"),
        ({"rejected": [{"role": "assistant"}]}, "data_pair", "expected a non-empty text or messages with role"),
        ({"prompt": None}, "data_pair", "line 4: prompt is"),
        ({"chosen": "yes \ud83d"}, "data_text", r"line 4: chosen holds '\\ud83d' at character 4"),
        ({"prompt": [{"role": "user", "content": "\ud83d"}]}, "data_text", r"line 4: prompt holds '\\ud83d'"),
        ({"prompt": 7}, "data_pair", "line 4: prompt is 7, expected a non-empty text"),
        ({"chosen": "a " * 600}, "pair_too_long", r"line 4: chosen has 601 tokens, at most 512 allowed \(sampling.max"),
        ({"prompt": "a " * 1100}, "pair_too_long", "prompt has 1100 tokens, at most 1024 allowed"),
    ],
)
def test_a_bad_row_is_named(tmp_path, change, code, message):
    rows = [*ROWS[:3], {**ROWS[3], **change}, *ROWS[4:]]
    with pytest.raises(InvalidData, match=message) as caught:
        load(tmp_path, rows)
    assert caught.value.code == code


def test_long_rows_can_be_left_out(tmp_path):
    rows = [{**ROWS[0], "chosen": "a " * 600}, *ROWS[1:]]
    assert load(tmp_path, rows, too_long="drop").dropped >= 1


def test_too_few_pairs_are_refused(tmp_path):
    with pytest.raises(InvalidData, match="has 1 pairs, expected at least two"):
        load(tmp_path, ROWS[:1])
    with pytest.raises(InvalidData, match="of 2 pairs 1 are held out and none is left to train on"):
        load(tmp_path, [ROWS[0], {**ROWS[0], "chosen": "maybe"}])


def test_a_missing_column_is_named_with_its_key(tmp_path):
    rows = [{"prompt": "a", "good": "b", "rejected": "c"}] * 3
    with pytest.raises(InvalidData, match=r"no column 'chosen' \(data.preferences.chosen_field\), only id, prompt"):
        load(tmp_path, rows)


def test_long_pairs_are_left_out_before_a_share_is_held_out(tmp_path):
    held_out = {row.text for row in load(tmp_path, ROWS).validation.rows}
    rows = [{**row, "chosen": "a " * 600} if row["prompt"] in held_out else row for row in ROWS]
    data = load(tmp_path, rows, too_long="drop")
    assert (len(data.train), len(data.validation), data.dropped) == (18, 1, 1)


@pytest.mark.parametrize(
    ("family", "end"), [("gemma", "<end_of_turn>"), ("chatml", "<|im_end|>"), ("llama", "<|eot_id|>")]
)
def test_answers_end_as_the_models_template_ends_a_turn(tmp_path, family, end):
    tokenizer = small_tokenizer(family)
    data = load(tmp_path, ROWS, tokenizer=tokenizer)
    row = data.train[0]
    assert tokenizer.decode(row.chosen_token_ids) == row.chosen + end
    assert tokenizer.decode(row.rejected_token_ids) == row.rejected + end
    assert end != tokenizer.eos_token


def test_a_conversation_that_the_template_refuses_is_named(tmp_path):
    question = {"role": "user", "content": "one"}
    rows = [*ROWS[:2], {**ROWS[2], "prompt": [question, question]}]
    with pytest.raises(InvalidData, match=r"pairs.jsonl line 3: .*Conversation roles must alternate"):
        load(tmp_path, rows, tokenizer=small_tokenizer("gemma"))
