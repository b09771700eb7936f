"""The hosting platform's files: CI runs what .ci/run says, and nothing else decides what has to hold."""

from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
GITHUB = ROOT / ".github"


def test_the_workflow_runs_the_same_as_everybody() -> None:
    workflow = yaml.safe_load((GITHUB / "workflows/ci.yml").read_text())
    [job] = workflow["jobs"].values()
    checkout, _, check = job["steps"]
    assert check == {"run": ".ci/run"}
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    assert checkout["with"]["fetch-depth"] == 0
    assert workflow["permissions"] == {"contents": "read"}


@pytest.mark.parametrize("form", ["bug", "feature"])
def test_an_issue_form_asks_for_something(form: str) -> None:
    tree = yaml.safe_load((GITHUB / f"ISSUE_TEMPLATE/{form}.yml").read_text())
    assert {"name", "description", "body"} <= tree.keys()
    fields = [field for field in tree["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields) >= 3
    assert any(field.get("validations", {}).get("required") for field in fields)
