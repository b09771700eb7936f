"""The reference of the built-in scorers: every option with its default, and examples that come out as the page says."""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import yaml

from services.common.config import DataConfig, RewardConfig, ScorerConfig
from services.common.data.rows import metadata, read_rows
from services.reward.scorers import BUILT_IN, load_scorer

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/rewards.md").read_text(encoding="utf-8")
OPTIONS = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `([^`]+)` \| ", PAGE, re.MULTILINE)
EXAMPLES = re.findall(r"^\| `(\w+)` \| `(\{[^`]*)` \| `([^`]+)` \| `([^`]+)` \| `([01])` \|$", PAGE, re.MULTILINE)


def test_every_option_of_every_scorer_is_listed_with_its_default() -> None:
    listed = {(scorer, option): yaml.safe_load(default) for scorer, option, default in OPTIONS}
    real = {
        (scorer, option): parameter.default
        for scorer, module in BUILT_IN.items()
        for option, parameter in inspect.signature(importlib.import_module(module).build).parameters.items()
    }
    assert listed == real


@pytest.mark.parametrize(("scorer", "options", "row", "completion", "reward"), EXAMPLES)
def test_an_example_comes_out_as_the_page_says(
    scorer: str, options: str, row: str, completion: str, reward: str
) -> None:
    score = load_scorer(ScorerConfig(name=scorer, options=json.loads(options)))
    assert score("", completion, json.loads(row)) == float(reward)


def test_there_are_examples() -> None:
    assert {scorer for scorer, *_ in EXAMPLES} == set(BUILT_IN) - {"reasoning_gym"}


def test_gsm8k_as_the_page_has_it(tmp_path, monkeypatch) -> None:
    code = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "gsm8k" in block)
    settings = yaml.safe_load(next(block for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)))
    solution = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### 1,072"

    def load_dataset(path, name, split):
        assert (path, name) == ("openai/gsm8k", "main")
        return datasets.Dataset.from_list([{"question": f"How many in {split}?", "answer": solution}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    data, reward = DataConfig(**settings["data"]), RewardConfig(**settings["reward"])
    scorer = load_scorer(reward.scorers[0])
    for source in (data.prompts, data.validation):
        [row] = read_rows(source, "data")
        text, _ = metadata(row, source.prompt_field)
        assert scorer(row.values["question"], "48 + 1024 = 1072", json.loads(text)) == 1.0
        assert scorer(row.values["question"], "24", json.loads(text)) == 0.0


@pytest.mark.parametrize(
    ("where", "path", "found"), [("project", "", True), ("elsewhere", "", False), ("elsewhere", "project", True)]
)
def test_an_own_module_is_looked_for_in_the_working_directory_and_on_the_path(tmp_path, where, path, found) -> None:
    """Not next to the YAML as such. The check is started as the service is."""
    for directory in ("project", "elsewhere"):
        (tmp_path / directory).mkdir()
    (tmp_path / "project/my_rewards.py").write_text("def score(prompt, completion, metadata):\n    return 1.0\n")
    tree = {
        "run": {"name": "own"},
        "prepare": {"command": ["true"], "creates": str(tmp_path / "never")},
        "model": {"path": "model"},
        "data": {"train": {"kind": "jsonl", "path": "train.jsonl"}},
        "reward": {"scorers": [{"name": "my_rewards:score"}]},
    }
    settings, output = tmp_path / "project/run.yaml", tmp_path / "report.json"
    settings.write_text(yaml.safe_dump(tree))
    search = [str(ROOT), str(ROOT / "proto"), *([str(tmp_path / path)] if path else [])]
    subprocess.run(
        [sys.executable, "-m", "services.reward.check", "--config", str(settings), "--output", str(output)],
        check=True,
        cwd=tmp_path / where,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search)},
        timeout=120,
    )
    findings = json.loads(output.read_text())["findings"]
    assert findings == ([] if found else ["reward.scorers: there is no module 'my_rewards' (my_rewards:score)"])
