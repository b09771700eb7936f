"""The trainer as a process, on what it cannot use: status 2 and the reason, before a model is loaded."""

import json

import pytest
import yaml

from tests.support.trainer.small_tokenizers import small_tokenizer


@pytest.fixture
def tree(tmp_path):
    """A model whose weights nothing can load: who gets as far as that says so."""
    model = tmp_path / "model"
    small_tokenizer("gemma").save_pretrained(model)
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3"}), encoding="utf-8")
    (model / "model.safetensors").write_bytes(b"no weights")
    return {
        "run": {"name": "start", "directory": str(tmp_path / "runs")},
        "model": {"path": str(model)},
        "data": {"train": {"kind": "jsonl", "path": str(tmp_path / "train.jsonl")}},
        "reward": {"scorers": [{"name": "exact_match"}]},
        "redis": {"url": "redis://127.0.0.1:9/0"},
        "trainer": {"device": "cpu"},
    }


@pytest.mark.parametrize(
    ("text", "change", "words"),
    [
        ('{"prompt": "a"}\n{"prompt": "b \\ud83d"}\n', {}, "train.jsonl line 2: prompt holds '\\ud83d' at character 2"),
        (None, {}, "data.train.path is"),
        ('{"prompt": "a"}\n' * 2, {"data": {"system_prompt": "be brief"}}, "data.system_prompt is set"),
        ('{"prompt": "a"}\n' * 2, {"model": {"path": "/no/such"}}, "model.path is '/no/such'"),
    ],
)
def test_data_that_cannot_be_used_are_refused_before_a_model_is_loaded(
    warm_process, tree, tmp_path, text, change, words
):
    if text is not None:
        (tmp_path / "train.jsonl").write_text(text, encoding="utf-8")
    for section, values in change.items():
        tree[section].update(values)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    ended = warm_process.run("services.trainer", "--config", str(tmp_path / "run.yaml"))
    assert ended.returncode == 2, ended.stderr
    assert words in json.loads(ended.stderr.splitlines()[-1])["reason"]
