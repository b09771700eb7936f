"""What the page does with a policy works on one that is written as a checkpoint's is."""

import re
from pathlib import Path

from examples.quickstart.model import build_model
from examples.quickstart.tokenizer import build_tokenizer
from services.trainer.export.policy_files import copy_tokenizer, write_model

PAGE = (Path(__file__).parents[3] / "docs/policy.md").read_text(encoding="utf-8")


def test_the_code_for_transformers_runs_as_it_stands(tmp_path, monkeypatch, capsys) -> None:
    tokenizer, source, policy = build_tokenizer(), tmp_path / "source", tmp_path / "my-policy"
    model = build_model(tokenizer, 1, max_length=64)
    tokenizer.save_pretrained(source)
    write_model(model, model.state_dict(), policy)
    copy_tokenizer(source, policy)
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    answer = names["answer"]
    prompt = names["prompt"]["input_ids"]
    assert answer[0, : prompt.shape[1]].tolist() == prompt[0].tolist()
    assert 1 <= answer.shape[1] - prompt.shape[1] <= 16
    assert capsys.readouterr().out.endswith("\n")
