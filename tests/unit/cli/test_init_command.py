"""`trivet init`: what it writes passes `trivet check`, and it never overwrites."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from examples.quickstart.tokenizer import build_tokenizer
from services.cli.app import app
from services.cli.check.machine import machine_report
from services.common.config import load_config
from services.common.data.rows import read_rows
from services.common.run_files.check_report import CheckReport
from services.reward import check as reward_check
from services.trainer import check as trainer_check


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(directory)
    config = {"model_type": "qwen3", "hidden_size": 8, "vocab_size": 261, "max_position_embeddings": 640}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


@pytest.fixture
def dataset(tmp_path):
    def write(*rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


def init(model, dataset, file, *options):
    arguments = ["init", "--model", str(model), "--dataset", str(dataset), *options, str(file)]
    return CliRunner().invoke(app, arguments)


def rows(answer, count=4, **columns):
    return [{"question": f"{n} and 1?", answer: f"{n + 1}", **columns} for n in range(count)]


def test_what_it_writes_passes_the_check(model, dataset, tmp_path):
    file = tmp_path / "My first.yaml"
    ended = init(model, dataset(*rows("solution", 20)), file)
    assert ended.exit_code == 0, ended.output

    config = load_config(file)
    assert config.run.name == "my-first"
    assert config.data.prompts.prompt_field == "question"
    assert config.data.chat_template
    assert [(each.name, each.options) for each in config.reward.scorers] == [("numeric", {"answer_field": "solution"})]
    assert config.model.max_length == config.data.max_prompt_tokens + config.sampling.max_tokens <= 640
    config = load_config(file, [f"run.directory={tmp_path}"])
    # What `trivet check` does, in one process.
    assert [trainer_check.report(config), reward_check.report(config)] == [CheckReport()] * 2
    assert machine_report(config, starts=False) == CheckReport()


def test_pairs_are_learnt_from_without_a_reward(model, dataset, tmp_path):
    pairs = [{"prompt": f"{n}?", "chosen": f"{n}", "rejected": "no"} for n in range(4)]
    ended = init(model, dataset(*pairs), tmp_path / "run.yaml")
    assert ended.exit_code == 0, ended.output
    config = load_config(tmp_path / "run.yaml")
    assert config.algorithm.name == "dpo"
    assert config.data.preferences is not None
    assert config.reward.scorers == []


@pytest.mark.parametrize(
    ("answers", "options", "scorer"),
    [
        ({"answer": "four"}, [], "exact_match"),
        ({"answer": "012"}, [], "exact_match"),
        ({"answer": r"\frac{1}{2}"}, [], "math_verify"),
        ({"answer": "four"}, ["--scorer", "my.rewards:short"], "my.rewards:short"),
        ({"other": "four"}, ["--scorer", "my.rewards:short"], "my.rewards:short"),
    ],
)
def test_the_scorer_fits_the_answers_unless_one_is_named(model, dataset, tmp_path, answers, options, scorer):
    file = tmp_path / "run.yaml"
    ended = init(model, dataset(*({"prompt": f"{n}?", **answers} for n in range(4))), file, *options)
    assert ended.exit_code == 0, ended.output
    assert [each.name for each in load_config(file).reward.scorers] == [scorer]


def test_a_task_of_reasoning_gym_is_known_by_its_name(model, tmp_path):
    ended = init(model, "chain_sum", tmp_path / "run.yaml", "--name", "sums", "--algorithm", "dapo")
    assert ended.exit_code == 0, ended.output
    config = load_config(tmp_path / "run.yaml")
    assert (config.run.name, config.algorithm.name) == ("sums", "dapo")
    assert (config.data.prompts.kind, config.reward.scorers[0].name) == ("reasoning_gym", "reasoning_gym")


def test_a_subset_is_read_and_written(model, tmp_path):
    directory = tmp_path / "sums"
    for subset, last in (("easy", "4"), ("hard", "400")):
        (directory / subset).mkdir(parents=True)
        answers = [*(str(n) for n in range(3)), last]
        lines = [json.dumps({"question": "?", "answer": f"{subset} {answer}"}) for answer in answers]
        (directory / subset / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    configs = "".join(f"\n- config_name: {name}\n  data_files: {name}/*.jsonl" for name in ("easy", "hard"))
    (directory / "README.md").write_text(f"---\nconfigs:{configs}\n---\n", encoding="utf-8")

    ended = init(model, directory, tmp_path / "run.yaml", "--subset", "hard")
    assert ended.exit_code == 0, ended.output
    config = load_config(tmp_path / "run.yaml")
    assert config.data.train.options == {"name": "hard"}
    assert [row.values["answer"] for row in read_rows(config.data.train, "data.train")][-1] == "hard 400"

    none = init(model, directory, tmp_path / "none.yaml")
    assert none.exit_code == 2
    assert "['easy', 'hard']" in none.output.replace("\n", " ")


def test_a_subset_of_what_has_none_is_refused(model, dataset, tmp_path):
    ended = init(model, dataset(*rows("answer")), tmp_path / "run.yaml", "--subset", "main")
    assert ended.exit_code == 2
    assert "--subset is 'main', expected none" in ended.output


def test_a_file_that_exists_is_left_alone(model, dataset, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("mine", encoding="utf-8")
    ended = init(model, dataset(*rows("answer")), file)
    assert ended.exit_code == 2
    assert "run.yaml exists, expected a new file" in ended.output.replace("\n", "")
    assert file.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"words": 3}, "whose columns are id, words: expected text in one of prompt, question"),
        ({"prompt": "4?"}, "whose columns are id, prompt: expected an answer in one of answer, solution"),
        ({"prompt": "4?" * 600, "answer": "4"}, "expected at most 624: --model has 640 positions"),
    ],
)
def test_what_no_run_can_be_made_of_is_named_and_nothing_is_written(model, dataset, tmp_path, row, words):
    ended = init(model, dataset(row), tmp_path / "run.yaml")
    assert ended.exit_code == 2
    assert words in ended.output
    assert not (tmp_path / "run.yaml").exists()
