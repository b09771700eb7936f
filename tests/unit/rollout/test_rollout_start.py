"""The rollout as a process, on a model that it cannot use: status 2 and the reason, before vLLM is imported."""

import json

import pytest
import yaml

from tests.support.warm_process import WarmProcess

TREE = {
    "run": {"name": "start"},
    "data": {"train": {"kind": "jsonl", "path": "none.jsonl"}},
    "reward": {"scorers": [{"name": "exact_match"}]},
    "redis": {"url": "redis://127.0.0.1:9/0"},
}


@pytest.fixture(scope="module")
def rollout():
    with WarmProcess("services.rollout") as rollout:
        yield rollout


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (None, "there is no such directory"),
        ([], "there is no config.json"),
        (["config.json"], "there are no weights"),
    ],
)
def test_a_model_that_is_not_there_is_refused(rollout, tmp_path, files, words):
    model = tmp_path / "model"
    for name in files or ():
        model.mkdir(exist_ok=True)
        (model / name).write_text("{}", encoding="utf-8")
    if files == []:
        model.mkdir()
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**TREE, "model": {"path": str(model)}}), encoding="utf-8")
    ended = rollout.run("services.rollout", "--config", str(tmp_path / "run.yaml"))
    assert ended.returncode == 2, ended.stderr
    reason = json.loads(ended.stderr.splitlines()[-1])["reason"]
    assert reason.startswith(f"model.path is {str(model)!r}")
    assert words in reason
