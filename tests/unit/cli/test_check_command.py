"""`trivet check` as a user runs it: every finding of every service at once, and nothing started."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from examples.quickstart.tokenizer import build_tokenizer
from services.cli.__main__ import app
from services.cli.check import command as check_command
from services.cli.check.command import check_all
from services.cli.check.machine import machine_report
from services.common.config import parse_config
from services.reward import check as reward_check
from services.trainer import check as trainer_check

MODEL = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 8,
    "vocab_size": 261,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


@pytest.fixture
def tree(model, tmp_path):
    rows = [{"prompt": f"sort {n}", "answer": str(n)} for n in range(20)]
    write(tmp_path / "train.jsonl", rows)
    return {
        "run": {"name": "checked", "directory": str(tmp_path / "runs")},
        "model": {"path": str(model)},
        "data": {"train": {"kind": "jsonl", "path": str(tmp_path / "train.jsonl")}},
        "reward": {"scorers": [{"name": "exact_match"}]},
    }


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def problems(tree):
    config = parse_config(tree)
    return trainer_check.find_problems(config) + list(reward_check.report(config).findings)


def test_nothing_is_found_where_nothing_is_wrong(tree):
    assert problems(tree) == []
    assert trainer_check.report(parse_config(tree)).doubts == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"algorithm": {"name": "grop"}}, ["algorithm.name is 'grop', expected one of ppo"]),
        ({"algorithm": {"name": "no_such_module:f"}}, ["algorithm.name is 'no_such_module:f'", "No module named"]),
        ({"algorithm": {"beta": 0.1}}, ["algorithm.beta is 0.1, expected none"]),
        ({"reward": {"scorers": [{"name": "oracle"}]}}, ["reward.scorers: name is 'oracle', expected one of"]),
        ({"reward": {"scorers": [{"name": "no_such:f"}]}}, ["reward.scorers: there is no module 'no_such'"]),
        ({"reward": {"scorer_user": "no-such-user"}}, ["reward.scorer_user is 'no-such-user', expected a user"]),
        (
            {"reward": {"scorers": [{"name": "exact_match", "options": {"answer_field": "solution"}}]}},
            ["exact_match cannot score", "train.jsonl line 1 of data.train", "metadata.solution is missing", "19 more"],
        ),
        ({"model": {"path": "/no/such/model"}}, ["model.path is '/no/such/model'", "there is no such directory"]),
        ({"reference": {"path": "/no/such"}}, ["reference.path is '/no/such'", "there is no such directory"]),
        ({"data": {"prompt_field": "question"}}, ["no column 'question' (data.train.prompt_field), only id, prompt"]),
        ({"data": {"path": "/no/such.jsonl"}}, ["data.train.path is '/no/such.jsonl'", "it does not exist"]),
        ({"data": {"kind": "hf", "path": "SAVED", "split": "tain"}}, ["data.train.split is 'tain', expected", "train"]),
        ({"data": {"kind": "hf", "path": "/no/such"}}, ["data.train.path is '/no/such'", "datasets cannot load it"]),
        ({"data": {"kind": "hf", "path": "DIRECTORY"}}, ["data.train.path is", "DatasetGenerationError"]),
        ({"data": {"kind": "reasoning_gym", "path": "chain_sums", "size": 4}}, ["data.train.path is 'chain_sums'"]),
        (
            {"data": {"kind": "reasoning_gym", "path": "chain_sum", "size": 4, "options": {"tems": 1}}},
            ["data.train.options are {'tems': 1}: chain_sum does not take them"],
        ),
    ],
)
def test_what_cannot_be_used_is_found_and_named_by_key(tree, tmp_path, monkeypatch, change, words):
    monkeypatch.setattr(reward_check, "CALLED_ROWS", 0)
    for section, values in change.items():
        target = tree["data"]["train"] if section == "data" else tree.setdefault(section, {})
        target.update(values)
    if tree["data"]["train"]["path"] == "SAVED":
        import datasets

        tree["data"]["train"]["path"] = str(tmp_path / "saved")
        rows = datasets.Dataset.from_list([{"prompt": f"sort {n}", "answer": str(n)} for n in range(4)])
        datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "saved"))
    if tree["data"]["train"]["path"] == "DIRECTORY":
        (tmp_path / "broken").mkdir()
        (tmp_path / "broken" / "train.json").write_text("no rows", encoding="utf-8")
        tree["data"]["train"]["path"] = str(tmp_path / "broken")
    found = problems(tree)
    assert len(found) == 1
    for word in words:
        assert word in found[0]


def test_a_scorer_is_loaded_with_the_variables_that_it_will_have(tree, tmp_path, monkeypatch):
    module = "import os\nKEY = os.environ['JUDGE_KEY']\ndef judge(prompt, completion, metadata):\n    return 1.0\n"
    (tmp_path / "scorers_with_a_key.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("JUDGE_KEY", "secret")
    tree["reward"] = {"scorers": [{"name": "scorers_with_a_key:judge"}]}
    assert problems(tree) == ["reward.scorers: importing scorers_with_a_key failed (KeyError: 'JUDGE_KEY')"]
    tree["reward"]["scorer_environment"] = ["JUDGE_KEY"]
    assert problems(tree) == []


@pytest.mark.parametrize(
    ("body", "weight", "words"),
    [
        (
            "raise KeyError('gold')",
            1,
            ["reward cannot score", "train.jsonl line 1", "KeyError: 'gold'"],
        ),
        (
            "return 'good'",
            1,
            ["rewards_of_a_test:reward cannot score", "line 1 of data.train", "returned str, expected a number"],
        ),
        ("return float(completion == metadata['answer'])", 2, ["reward is 2, expected 0 to 1 (reward.minimum and"]),
        ("return float(completion == metadata['answer'])", 1, []),
    ],
)
def test_scorers_are_called_as_the_service_would(tree, tmp_path, monkeypatch, body, weight, words):
    (tmp_path / "rewards_of_a_test.py").write_text(f"def reward(prompt, completion, metadata):\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    tree["reward"]["scorers"] = [{"name": "rewards_of_a_test:reward", "weight": weight}]
    found = reward_check.report(parse_config(tree)).findings
    assert len(found) == bool(words)
    for word in words:
        assert word in found[0]


@pytest.mark.parametrize(
    ("max_tokens", "words"),
    [
        (32, "model.max_length is 2048, expected at most 1100, the positions of model.path"),
        (512, "and data.max_prompt_tokens + sampling.max_tokens (1536) no more than that; the longest prompt has "),
    ],
)
def test_more_tokens_than_the_model_has_positions_for_are_a_finding(tree, model, tmp_path, max_tokens, words):
    import shutil

    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "config.json").write_text(json.dumps({**MODEL, "max_position_embeddings": 1100}), encoding="utf-8")
    tree["model"]["path"] = str(copy)
    tree["sampling"] = {"max_tokens": max_tokens}
    [found] = trainer_check.find_problems(parse_config(tree))
    assert words in found


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda model: (model / "config.json").unlink(), "there is no config.json"),
        (lambda model: (model / "config.json").write_text('{"model_type": "qwen9"}'), "transformers does not read"),
        (lambda model: (model / "model.safetensors").write_bytes(b""), "there are no weights"),
        (lambda model: [file.unlink() for file in model.glob("tokenizer*")], "has no tokenizer"),
    ],
)
def test_an_incomplete_model_is_named(tree, model, tmp_path, damage, words):
    import shutil

    copy = shutil.copytree(model, tmp_path / "copy")
    damage(copy)
    tree["model"]["path"] = str(copy)
    found = problems(tree)
    assert len(found) == 1
    assert f"model.path is {str(copy)!r}" in found[0]
    assert words in found[0]


def test_a_hub_that_cannot_be_asked_is_said_at_once(tree, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    tree["model"]["path"] = "nobody/nothing"
    found = problems(tree)
    assert len(found) == 1
    assert "model.path is 'nobody/nothing'" in found[0]
    assert "the hub cannot be asked for it" in found[0]


def test_data_and_model_wait_for_what_makes_them(tree, tmp_path):
    tree["prepare"] = {"command": ["true"], "creates": str(tmp_path / "made")}
    tree["model"]["path"] = "/no/such/model"
    tree["data"]["train"]["path"] = "/no/such.jsonl"
    tree["algorithm"] = {"name": "grop"}
    assert [sentence.split(" is ")[0] for sentence in problems(tree)] == ["algorithm.name"]
    (tmp_path / "made").touch()
    assert len(problems(tree)) == 3


def test_a_row_past_the_first_ones_may_be_what_is_needed(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_check, "ROWS", 1)
    assert problems(tree) == []


def test_all_findings_come_at_once_from_checks_that_import_neither_vllm_nor_deepspeed(tree, tmp_path, monkeypatch):
    write(tmp_path / "train.jsonl", [{"prompt": "a \ud83d"}, *({"prompt": f"sort {n}"} for n in range(5))])
    tree["algorithm"] = {"name": "grop"}
    tree["reference"] = {"path": "/no/such/reference"}
    tree["reward"]["scorers"].append({"name": "oracle"})
    tree["redis"] = {"url": "redis://:secret-password@127.0.0.1:9/0"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    # The services' checks leave a line in their logs for each module that they import.
    logs, reports = tmp_path / "logs", []
    logs.mkdir()
    monkeypatch.setattr(check_command.tempfile, "TemporaryDirectory", lambda **_: nullcontext(logs))
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")

    def check_once(config, *, starts):
        """`up` is given what `check` has found: the services' checks are the same for both."""
        reports.extend(() if reports else check_all(config, starts=starts))
        return reports

    monkeypatch.setattr(check_command, "check_all", check_once)
    for command in ("check", "up"):
        ended = CliRunner().invoke(app, [command, str(tmp_path / "run.yaml")])
        assert ended.exit_code == 2, ended.output
        for words in (
            "algorithm.name is 'grop'",
            "reference.path is '/no/such/reference'",
            r"train.jsonl line 1: prompt holds '\ud83d' at character 2",
            "reward.scorers: exact_match cannot score",
            "reward.scorers: name is 'oracle'",
        ):
            assert words in ended.output
        assert "secret-password" not in ended.output
        assert not (tmp_path / "runs").exists()
    for service, needed in (("trainer", "transformers"), ("reward", "pydantic")):
        lines = (logs / f"{service}.log").read_text(encoding="utf-8").splitlines()
        imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
        assert needed in imported
        assert not {"vllm", "deepspeed"} & imported


def test_data_come_before_a_model_that_is_missing_too(tree):
    tree["model"]["path"] = "/no/such/model"
    tree["data"]["train"]["prompt_field"] = "question"
    found = trainer_check.find_problems(parse_config(tree))
    assert len(found) == 2
    assert "line 1: there is no column 'question' (data.train.prompt_field), only id, prompt, answer" in found[0]
    tree["data"]["train"]["path"] = "/no/such.jsonl"
    found = problems(tree)
    assert len(found) == 2
    assert "data.train.path is '/no/such.jsonl'" in found[0]
    assert "model.path is '/no/such/model'" in found[1]


def test_a_run_without_findings_is_reported_so(tree, tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")

    def check_here(config, *, starts):
        return [trainer_check.report(config), reward_check.report(config), machine_report(config, starts=starts)]

    monkeypatch.setattr(check_command, "check_all", check_here)
    ended = CliRunner().invoke(app, ["check", str(tmp_path / "run.yaml")])
    assert ended.exit_code == 0, ended.output
    assert "nothing found" in ended.output


def test_a_check_that_fails_itself_is_a_finding(tree, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert [report.findings for report in check_all(parse_config(tree))] == [
        *((f"the {service}'s check ended with status 1: it said nothing",) for service in ("trainer", "reward")),
        (),
    ]


@pytest.mark.parametrize(("stops", "reported"), [(None, True), (3, True), (1, False), ([7, 1], False)])
def test_a_turn_at_whose_end_the_sampler_continues_is_a_doubt(tree, model, tmp_path, stops, reported):
    """As with a base model whose tokenizer has a chat template; the quickstart ends turns with token 1."""
    import shutil

    copy = shutil.copytree(model, tmp_path / "copy")
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<|system|>"}), encoding="utf-8")
    if stops is not None:
        (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}), encoding="utf-8")
    tree["model"]["path"] = str(copy)
    report = trainer_check.report(parse_config(tree))
    assert report.findings == ()
    assert len(report.doubts) == reported
    assert all("ends a turn with the token 1, at which the sampler does not stop" in doubt for doubt in report.doubts)
